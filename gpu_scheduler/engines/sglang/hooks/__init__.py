"""Hooks on SGLang's internals, one file a subject; `plugin.py` registers them. Each file begins with a table of its
hooks: the target in SGLang, the reason, and what breaks without it. `HOOKS` at its end has the full names.

process         one process builds model after model
loop            SGLang's event loop
sampling        seeds, penalties, drawing
logprobs        log-probabilities of prompts, and of given tokens after them
grammar         structured answers
memory          KV pool, allocator, eviction
graphs          CUDA graphs
lora            buffers of adapters
"""
