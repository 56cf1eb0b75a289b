"""Which prefill steps run as CUDA graphs: those that would take their host longer than their device.

The host's time for a step does not grow with its tokens: it launches some twenty kernels for each layer, which takes 12
to 30 ms, depending on the processor. With a graph that is 5 to 8 ms. On an H200 the device needs 8 ms for 2,048 tokens
of a 1B model, 21 of a 3B and 41 of an 8B, so that short prompts of large models and all prompts of small ones wait for
their host. Prompts of 1,770 tokens that came at once to a 1B model had their first tokens 20 to 30 ms after one another
without graphs and 12.5 with them; on a 3B model 43 and 23, on an 8B model 49 either way (docs/lab/gpu-runs.md).

A step is padded to the size of a graph, by a sixth in the mean, which costs most where the device is the bottleneck;
and each graph size costs a cold start a tenth of a second. So larger steps have none.
"""

from __future__ import annotations

LEAST_TOKENS, MOST_TOKENS = 512, 2048
_WORK = 14e12
"""Tokens times bytes of weights of a step that keeps an H200 busy for 18 to 22 ms."""


def graph_tokens(weights_bytes: int) -> int:
    """Tokens of the largest step that has a graph. `weights_bytes`: weights on each device; 0: unknown."""
    tokens = LEAST_TOKENS
    while 0 < weights_bytes * 2 * tokens <= _WORK and tokens < MOST_TOKENS:
        tokens *= 2
    return tokens
