"""Small fleets and traces with round numbers."""

import random
from dataclasses import replace
from math import inf

from sim.engines.cost import H200, Shape
from sim.inputs import catalogue
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Workload
from sim.policies import SYSTEMS
from sim.replay import Replay

GB = 10**9
ROUND = replace(
    H200,
    step_layer_s=0.01 / 32,
    weight_bytes_per_s=inf,
    request_s_per_byte=0.0,
    kv_bytes_per_s=inf,
    decode_host_s=0.0,
    decode_host_request_s=0.0,
    prefill_host_s=0.0,
    prefill_after_s=0.0,
    prefill_step_s=0.1,
    prefill_chunk=8192,
    prefill_s_per_token_byte=0.001 / GB,
    prefill_s_per_token_layer=0.0,
    attention_s=0.0,
    exchange_s=0.0,
    sharing=1.0,
    decode_sharing=1.0,
    path_s=0.05,
    handover_s=0.0,
    capture_share=0.0,
    wake_base_s=0.3,
    cold_base_s=2.0,
    cold_layer_s=0.0,
    link_bytes_per_s=inf,
    host_bytes_per_s=inf,
    hibernate_s=0.01,
)
"""10 ms a decode step, 0.1 s a prefill step and 1 ms for each of its tokens, for models of 1 GB."""

SMALL = replace(
    H200,
    capacity_bytes=4 * GB,
    quota_bytes=GB // 20,
    kept_bytes=GB // 100,
    graph_bytes=0,
    prefill_graph_bytes=0,
    kv_extent_bytes=4 << 20,
)
"""A device that holds three of `crowded`'s models, with little KV."""


def models(*names, weights=GB, kv=1000, large=None, other_kinds=(), **facts):
    """`large`: bytes of weights of those that have others, by name; `other_kinds`: of KV, beside attention."""
    sizes = dict.fromkeys(names, weights) | (large or {})
    return catalogue.ModelSet(
        [
            catalogue.Spec(name, Shape(size, kv, facts.pop("devices", 1), other_kinds=other_kinds), **facts)
            for name, size in sizes.items()
        ]
    )


def replay(requests, known, policy="prism", sizes=(1,), hardware=ROUND, **options):
    seconds = max(request.arrival for request in requests) + 1.0
    run = Replay(
        Workload(requests, seconds),
        known,
        sizes,
        SYSTEMS[policy],
        hardware=hardware,
        progress=lambda line: None,
        **options,
    )
    return run.run()


def crowded(seed, count=400, names="abcdef"):
    """More models than a small device holds, in bursts, and long answers that fill its memory."""
    draw = random.Random(seed)
    at, requests = 0.0, []
    for i in range(count):
        at += draw.choice([0.0, 0.01, 0.05, 2.0])
        name = draw.choice(names[: 2 + int(at) % len(names)])
        ttft = draw.choice([0.5, 2.0, inf])
        requests.append(
            SimulatedRequest(str(i), name, at, draw.randint(1, 3000), draw.choice([1, 2, 50, 900]), ttft, 0.05)
        )
    return requests
