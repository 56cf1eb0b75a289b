"""How many prompt tokens a prefill step has at most: so many that its device needs as long for them as its host does.

The host's part of a step does not grow with its tokens: some 9 ms to launch the kernels of a 1B model, and as much for
choosing prompts and their places and for looking at what came out. On an H200 2,048 tokens of a 1B model take 9 ms. Six
prompts of 1,770 tokens that came at once had their first tokens 17 ms after one another (docs/policies.md); and while
they stand behind such a step (`precedence.py`), neighbours' decodes leave the device idle for half of it.
"""

from __future__ import annotations

LEAST_TOKENS, MOST_TOKENS = 2048, 8192
_WORK = 8e12
"""Tokens times bytes of weights, with which an H200 is busy for 14 ms."""


def chunk_tokens(weights_bytes: int, context_tokens: int) -> int:
    """`weights_bytes`: on each device; 0: not known. `context_tokens`: of its longest request; what a step takes of
    memory is measured with one, so several together are not to be more."""
    tokens = LEAST_TOKENS
    while 0 < weights_bytes * tokens < _WORK and 2 * tokens <= min(context_tokens, MOST_TOKENS):
        tokens *= 2
    return tokens
