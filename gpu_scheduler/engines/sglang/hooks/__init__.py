"""Hooks on SGLang's internals, and its Scheduler with methods of ours; one file for each subject. Each file begins with
a table: the target in SGLang, the reason, and what breaks without it. `HOOKS` at the end of a file has the full names
of its hooks, which `plugin.py` registers; `scheduler.py` has subclasses of SGLang's classes instead.

attention       attention in plain torch, on CPUs only
cpu_kernels     kernels that SGLang has for GPUs only
process         one process builds model after model
scheduler       SGLang's event loop: its Scheduler, with methods of ours
loop            admitting and retracting requests
sampling        seeds, penalties, drawing
logprobs        log-probabilities of prompts, and of given tokens after them
grammar         structured answers
memory          KV pool, allocator, eviction
graphs          CUDA graphs
lora            buffers of adapters
"""
