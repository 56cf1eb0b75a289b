"""FlashAttention 3 on page-major KV: are the numbers right, and what may be unmapped or unwritten around them?

Each case runs the call that SGLang's FlashAttention backend makes, once on 4-D views of one byte buffer of packed
envelopes and once on ordinary per-layer tensors, with every unused page and slot NaN, and compares the two bit for
bit and with float64. Then: storing through SGLang's kernel and through torch, decode in a CUDA graph while extents
are unmapped and mapped under it (stale page-table entries pointing at unmapped addresses), moving envelopes, and
speed.

    python -m benchmarks.gpu.page_major_attention --out DIR --commit HASH python -m
    benchmarks.gpu.page_major_attention --out DIR --harness-only      (no GPU: plain torch in FlashAttention's place)
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import report
from benchmarks.gpu.attention_cases import (
    LENGTHS,
    SHAPES,
    Batch,
    Shape,
    gathered_attention,
    make_batch,
    page_major_views,
    poison,
    reference,
    relative_error,
    write_slots,
)

Attention = Callable[..., torch.Tensor]


def _attention(harness_only: bool) -> Attention:
    if harness_only:
        return gathered_attention
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache


def _lengths(batch: Batch, device: str) -> dict[str, Any]:
    """What the call needs to know of the requests, on the device."""
    starts = list(itertools.accumulate(batch.new, initial=0))
    known: dict[str, Any] = {
        "page_table": batch.table,
        "cache_seqlens": torch.tensor(batch.lengths, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device=device),
        "max_seqlen_q": max(batch.new),
    }
    if max(batch.new) > 1:
        ends = list(itertools.accumulate(batch.lengths, initial=0))
        known["cu_seqlens_k_new"] = torch.tensor(ends, dtype=torch.int32, device=device)
    return known


def _call(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, known: dict[str, Any], splits: int
) -> torch.Tensor:
    """The output of attention, (tokens, query heads, head size), by the call that SGLang 0.5.23 makes
    (layers/attention/flashattention_backend.py, forward_decode and forward_extend)."""
    return attention(
        q=q,
        k_cache=k,
        v_cache=v,
        softmax_scale=q.shape[-1] ** -0.5,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        num_splits=splits,
        **known,
    )


def compare(
    attention: Attention, shape: Shape, page_size: int, phase: str, splits: int, seed: int, unused: str, device: str
) -> dict[str, Any]:
    """One case: page-major against per-layer tensors and float64, first, middle and last layer.

    `unused` is what every slot holds that no request owns: "nan", or "finite", as what a former request left there.
    """
    generator = torch.Generator(device).manual_seed(seed)
    lengths = list(LENGTHS)
    random.Random(seed).shuffle(lengths)
    new = [1] * len(lengths) if phase == "decode" else [max(1, n - (n * (i % 4)) // 4) for i, n in enumerate(lengths)]
    batch = make_batch(lengths, new, page_size, seed, device)
    raw = torch.empty(batch.pages * shape.envelope_bytes(page_size), dtype=torch.uint8, device=device)
    poison(raw) if unused == "nan" else raw.fill_(0x42)
    q = torch.randn(
        sum(new), shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device=device, generator=generator
    )
    at = list(itertools.accumulate(new, initial=0))
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    wrong = batch.table.clone()
    wrong[longest, 0] = batch.table[longest, -1]
    known = _lengths(batch, device)
    broken = {**known, "page_table": wrong}
    result: dict[str, Any] = {
        "bitwise_equal": True,
        "finite": True,
        "finite_per_layer": True,
        "wrong_page_is_nan": True,
    }
    result["wrong_page_differs"] = True
    errors: list[float] = []
    for layer in sorted({0, shape.layers // 2, shape.layers - 1}):
        views = page_major_views(raw, shape, page_size, layer)
        plain = [view.clone(memory_format=torch.contiguous_format) for view in views]
        kept: list[list[torch.Tensor]] = [[], []]
        for slots in batch.slots:
            for which in (0, 1):
                values = torch.randn(
                    len(slots),
                    shape.kv_heads,
                    shape.head_dim,
                    dtype=torch.bfloat16,
                    device=device,
                    generator=generator,
                )
                write_slots(views[which], slots, values)
                write_slots(plain[which], slots, values)
                kept[which].append(values)
        out = _call(attention, q, views[0], views[1], known, splits)
        other = _call(attention, q, plain[0], plain[1], known, splits)
        exact = torch.cat(
            [reference(q[at[i] : at[i + 1]], kept[0][i], kept[1][i], shape.head_dim**-0.5) for i in range(len(lengths))]
        )
        result["bitwise_equal"] &= bool(torch.equal(out.view(torch.int16), other.view(torch.int16)))
        result["finite"] &= bool(torch.isfinite(out).all())
        result["finite_per_layer"] &= bool(torch.isfinite(other).all())
        errors.append(relative_error(out, exact))
        # The check must be able to fail: one live entry of the table is turned to a page that nobody owns.
        bad = _call(attention, q, views[0], views[1], broken, splits)
        result["wrong_page_is_nan"] &= not bool(torch.isfinite(bad).all())
        result["wrong_page_differs"] &= not relative_error(bad, exact) < 2 * relative_error(out, exact)
    case = {"shape": shape.name, "phase": phase, "page_size": page_size, "splits": splits, "seed": seed}
    worst = None if any(math.isnan(e) for e in errors) else max(errors)
    return {**case, "unused": unused, **result, "relative_error": worst}


def store_case(shape: Shape, page_size: int, tokens: int, device: str) -> dict[str, Any]:
    """New K and V by rows of the page-major range, by torch indexing, into an ordinary tensor: same bytes? how long?"""
    from sglang.kernels.ops.kvcache.kvcache import can_use_store_cache, store_cache

    from gpu_scheduler.engines.sglang.kv.pools.kv_layouts import Rows

    pages = 2 * -(-tokens // page_size) + 2
    raws = [torch.empty(pages * shape.envelope_bytes(page_size), dtype=torch.uint8, device=device) for _ in range(2)]
    for raw in raws:
        poison(raw)
    slots = torch.randperm(pages * page_size, device=device)[:tokens]
    new = [torch.randn(tokens, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
    layer = shape.layers // 2
    by_kernel = page_major_views(raws[0], shape, page_size, layer)
    by_index = page_major_views(raws[1], shape, page_size, layer)
    row = shape.kv_heads * shape.head_dim
    plain = [torch.full((pages * page_size, row), float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2)]

    rows = Rows(raws[0].view(torch.bfloat16), shape.layers, page_size, row)
    k_rows, v_rows = rows.of_layer(layer)

    def kernel() -> None:
        at = rows.of_tokens(slots)
        store_cache(new[0].view(-1, row), new[1].view(-1, row), k_rows, v_rows, at, row_bytes=row * 2)

    def index() -> None:
        for view, values in zip(by_index, new, strict=True):
            write_slots(view, slots, values)

    def ordinary() -> None:
        store_cache(new[0].view(-1, row), new[1].view(-1, row), plain[0], plain[1], slots, row_bytes=row * 2)

    kernel()
    index()
    equal = bool(torch.equal(raws[0], raws[1]))
    entry: dict[str, Any] = {"shape": shape.name, "page_size": page_size, "tokens": tokens, "bytes_equal": equal}
    entry["kernel_us"], entry["torch_index_us"] = _device_us(kernel, index)
    if can_use_store_cache(row * 2):
        ordinary()
        here = [view[slots // page_size, slots % page_size].view(-1, row) for view in by_kernel]
        entry["equals_ordinary"] = all(torch.equal(mine, its[slots]) for mine, its in zip(here, plain, strict=True))
        (entry["ordinary_us"],) = _device_us(ordinary)
    return entry


def fused_store(shape: Shape, page_size: int, device: str) -> dict[str, Any]:
    """The store that some models fuse into RoPE, given page-major views the way SGLang's models/utils.py gives them."""
    from sglang.kernels.ops.attention.rope import FusedSetKVBufferArg, apply_rope_with_cos_sin_cache_inplace

    raw = torch.zeros(8 * shape.envelope_bytes(page_size), dtype=torch.uint8, device=device)
    views = page_major_views(raw, shape, page_size, 0)
    k_rows, v_rows = (view.view(view.shape[0], -1) for view in views)
    slots = torch.tensor([page_size + 3, 2 * page_size], device=device)
    q, k, v = (
        torch.randn(2, heads, shape.head_dim, dtype=torch.bfloat16, device=device)
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    )
    value = v.view(2, -1)
    table = torch.rand(64, shape.head_dim, device=device)
    fused = FusedSetKVBufferArg(value=value, k_buffer=k_rows, v_buffer=v_rows, cache_loc=slots)
    entry: dict[str, Any] = {"shape": shape.name, "page_size": page_size}
    try:
        apply_rope_with_cos_sin_cache_inplace(
            q, k, table, torch.arange(2, device=device), is_neox=True, fused_args=fused
        )
        torch.cuda.synchronize()
    except (RuntimeError, ValueError, TypeError) as error:
        return {**entry, "outcome": "refused", "message": str(error).strip().splitlines()[-1][:200]}
    stored = views[1][slots // page_size, slots % page_size]
    return {**entry, "outcome": "right" if torch.equal(stored, v) else "wrong slots written"}


def _device_us(*works: Callable[[], Any], repeats: int = 30, inner: int = 10) -> list[list[float]]:
    """Device time of one run of each, in turn; replays graphs of `inner` runs, so that launching is not timed."""
    side = torch.cuda.Stream()
    graphs = []
    for work in works:
        with torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(inner):
                work()
        graph.replay()
        graphs.append(graph)
    begun, ended = ([[torch.cuda.Event(enable_timing=True) for _ in works] for _ in range(repeats)] for _ in range(2))
    for i in range(repeats):
        for j, graph in enumerate(graphs):
            begun[i][j].record()
            graph.replay()
            ended[i][j].record()
    torch.cuda.synchronize()
    return [
        [round(begun[i][j].elapsed_time(ended[i][j]) * 1e3 / inner, 2) for i in range(repeats)]
        for j in range(len(works))
    ]


def speed(
    attention: Attention, shape: Shape, page_size: int, lengths: list[int], new: list[int], device: str
) -> dict[str, Any]:
    """One layer's attention on both layouts, in turn."""
    batch = make_batch(lengths, new, page_size, 1, device)
    raw = torch.randint(0, 60, (batch.pages * shape.envelope_bytes(page_size),), dtype=torch.uint8, device=device)
    views = page_major_views(raw, shape, page_size, shape.layers // 2)
    plain = [view.contiguous() for view in views]
    q = torch.randn(sum(new), shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    entry: dict[str, Any] = {"shape": shape.name, "page_size": page_size, "lengths": lengths, "new": new}
    known = _lengths(batch, device)
    entry["page_major_us"], entry["per_layer_us"] = _device_us(
        lambda: _call(attention, q, views[0], views[1], known, 0),
        lambda: _call(attention, q, plain[0], plain[1], known, 0),
    )
    return entry


def move_envelopes(shape: Shape, page_size: int, count: int, device: str) -> dict[str, Any]:
    """Live envelopes moved together: one copy of whole envelopes, beside SGLang's move of tokens layer by layer."""
    from sglang.srt.mem_cache.memory_pool import move_kv_cache_native

    nbytes = shape.envelope_bytes(page_size)
    raw = torch.randint(0, 60, (2 * count * nbytes,), dtype=torch.uint8, device=device)
    envelopes = raw.view(2 * count, nbytes)
    order = torch.randperm(2 * count, device=device)
    source, target = order[:count], order[count:]
    expected = envelopes[source].clone()

    def whole() -> None:
        envelopes.index_copy_(0, target, envelopes.index_select(0, source))

    whole()
    right = bool(torch.equal(envelopes[target], expected))
    pairs = [page_major_views(raw, shape, page_size, layer) for layer in range(shape.layers)]
    within = torch.arange(page_size, device=device)
    tokens = [(side[:, None] * page_size + within).reshape(-1) for side in (target, source)]

    def by_token() -> None:
        move_kv_cache_native([k for k, _ in pairs], [v for _, v in pairs], tokens[0], tokens[1], page_size=page_size)

    entry: dict[str, Any] = {
        "shape": shape.name,
        "page_size": page_size,
        "envelopes": count,
        "bytes": count * nbytes,
        "right": right,
    }
    entry["whole_us"], entry["by_token_us"] = _device_us(whole, by_token, repeats=10, inner=2)
    return entry


def remap_under_graph(shape: Shape, page_size: int, rounds: int, device: int, unmapped_tail: bool) -> dict[str, Any]:
    """Decode in one CUDA graph over a range whose extents come and go between replays.

    Each round other requests of other lengths live in other extents; the rest of the range is unmapped. The table's
    entries past a request's end point at unmapped addresses (`unmapped_tail`) or at the dummy page. Then an eager
    extend. Compared with an eager call on ordinary tensors, bit for bit.
    """
    from benchmarks.gpu import vmm

    attention, cuda = _attention(False), f"cuda:{device}"
    extents, nbytes = vmm.Extents(device), 2 << 20
    size = shape.envelope_bytes(page_size)
    pages = (256 * nbytes) // size
    base = vmm.reserve(256 * nbytes)
    raw = vmm.bytes_at(base, pages * size, device)
    mapped: dict[int, Any] = {}

    def want(live: set[int]) -> None:
        needed = {e for page in live for e in range(page * size // nbytes, -(-(page + 1) * size // nbytes))}
        for extent in set(mapped) - needed:
            extents.unmap(base + extent * nbytes, nbytes)
            extents.release(mapped.pop(extent))
        for extent in needed - set(mapped):
            handle = extents.create(nbytes)
            extents.map(base + extent * nbytes, nbytes, handle)
            extents.allow(base + extent * nbytes, nbytes)
            mapped[extent] = handle
            first, last = extent * nbytes, min((extent + 1) * nbytes, pages * size)
            raw[first:last].fill_(0xFF)

    most, requests, chance = 24, 8, random.Random(0)
    q = torch.randn(requests, shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device=cuda)
    table = torch.zeros(requests, most, dtype=torch.int32, device=cuda)
    lengths = torch.ones(requests, dtype=torch.int32, device=cuda)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=cuda)
    layer = shape.layers - 1
    views = page_major_views(raw, shape, page_size, layer)

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(
            q=q,
            k_cache=k,
            v_cache=v,
            page_table=table,
            cache_seqlens=lengths,
            cu_seqlens_q=starts,
            max_seqlen_q=1,
            softmax_scale=shape.head_dim**-0.5,
            causal=True,
            num_splits=0,
        )

    want({0})
    raw[:size].zero_()
    graph = torch.cuda.CUDAGraph()
    call(*views)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = call(*views)
    equal, finite, worst = True, True, 0.0
    for _ in range(rounds):
        count = [chance.randint(1, page_size * min(most - 1, pages // 16)) for _ in range(requests)]
        order = list(range(1, pages))
        chance.shuffle(order)
        need = [-(-n // page_size) for n in count]
        live = order[: sum(need)]
        want({0, *live})
        unbacked = [
            p for p in order[sum(need) :]
            if not any(e in mapped for e in range(p * size // nbytes, -(-(p + 1) * size // nbytes)))
        ]  # fmt: skip
        rows, at, exact, slots_of = [], 0, [], []
        plain = [torch.full(view.shape, float("nan"), dtype=torch.bfloat16, device=cuda) for view in views]
        for i, n in enumerate(count):
            own = live[at : at + need[i]]
            at += need[i]
            tail = [chance.choice(unbacked) if unmapped_tail else 0 for _ in range(most - len(own))]
            rows.append(own + tail)
            ids = (torch.tensor(own)[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:n].to(cuda)
            pair = [torch.randn(n, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16, device=cuda) for _ in range(2)]
            for which in (0, 1):
                write_slots(views[which], ids, pair[which])
                write_slots(plain[which], ids, pair[which])
            slots_of.append(ids)
            exact.append(reference(q[i : i + 1], pair[0], pair[1], shape.head_dim**-0.5))
        table.copy_(torch.tensor(rows, dtype=torch.int32))
        lengths.copy_(torch.tensor(count, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        equal &= bool(torch.equal(out, call(*plain)))
        finite &= bool(torch.isfinite(out).all())
        worst = max(worst, relative_error(out, torch.cat(exact)))
        # The same requests as an eager extend: the later half of each is queried.
        known = _lengths(Batch(count, [(n + 1) // 2 for n in count], table, slots_of, pages), cuda)
        more = torch.randn(
            sum(-(-n // 2) for n in count), shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device=cuda
        )
        extended = _call(attention, more, *views, known, 0)
        equal &= bool(torch.equal(extended, _call(attention, more, *plain, known, 0)))
        finite &= bool(torch.isfinite(extended).all())
    return {
        "shape": shape.name,
        "page_size": page_size,
        "rounds": rounds,
        "unmapped_tail": unmapped_tail,
        "bitwise_equal": equal,
        "finite": finite,
        "relative_error": worst,
    }


def _remap_in_own_process(
    shape: Shape, page_size: int, rounds: int, device: int, unmapped_tail: bool
) -> dict[str, Any]:
    """A fault poisons the context, so it must not be this process's."""
    what = json.dumps([shape.name, page_size, rounds, unmapped_tail])
    command = [sys.executable, "-m", "benchmarks.gpu.page_major_attention", "--out", "/dev/null"]
    done = subprocess.run(
        [*command, "--remap", what, "--device", str(device)], capture_output=True, text=True, timeout=180, check=False
    )
    if done.returncode == 0:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {"shape": shape.name, "page_size": page_size, "unmapped_tail": unmapped_tail, "failed": last[:300]}


def _print(result: dict[str, Any]) -> None:
    flags = ("bitwise_equal", "finite", "finite_per_layer", "wrong_page_is_nan", "wrong_page_differs")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in result["compare"]:
        groups.setdefault((case["phase"], case["page_size"], case["splits"], case["unused"]), []).append(case)
    rows = []
    for key, cases in groups.items():
        counts = [f"{sum(c[flag] for c in cases)}/{len(cases)}" for flag in flags]
        errors = [c["relative_error"] for c in cases if c["relative_error"] is not None]
        rows.append((*key, *counts, f"{max(errors):.1e}" if errors else "-"))
    header = ("phase", "page", "splits", "unused slots", *(flag.replace("_", " ") for flag in flags), "worst error")
    report.table("page-major against per-layer and float64, all shapes", header, rows)
    p50 = lambda e, k: report.spread(e[k])["p50"] if k in e else "-"  # noqa: E731
    report.table(
        "storing new K and V, us",
        (
            "shape",
            "page",
            "tokens",
            "bytes equal",
            "4-D kernel",
            "torch index",
            "per-layer kernel",
            "same as per-layer",
        ),
        [
            (
                e["shape"],
                e["page_size"],
                e["tokens"],
                e["bytes_equal"],
                p50(e, "kernel_us"),
                p50(e, "torch_index_us"),
                p50(e, "ordinary_us"),
                e.get("equals_ordinary", "-"),
            )
            for e in result["store"]
        ],
    )
    report.table(
        "one layer's attention, us",
        ("shape", "page", "requests", "new each", "page-major", "per-layer"),
        [
            (
                e["shape"],
                e["page_size"],
                len(e["lengths"]),
                e["new"][0],
                p50(e, "page_major_us"),
                p50(e, "per_layer_us"),
            )
            for e in result["speed"]
        ],
    )
    report.table(
        "decode graph, extents replaced between replays",
        ("shape", "page", "tail of the table", "result"),
        [
            (
                e["shape"],
                e["page_size"],
                "unmapped" if e["unmapped_tail"] else "dummy page",
                e.get("failed") or f"equal {e['bitwise_equal']}, finite {e['finite']}, error {e['relative_error']:.1e}",
            )
            for e in result["remap"]
        ],
    )
    report.table(
        "moving envelopes",
        ("shape", "page", "MiB", "right", "whole us", "token by token us"),
        [
            (e["shape"], e["page_size"], e["bytes"] >> 20, e["right"], p50(e, "whole_us"), p50(e, "by_token_us"))
            for e in result["move"]
        ],
    )

    for e in result["fused"]:
        print("store fused into RoPE, pages of", e["page_size"], e["outcome"], e.get("message", ""))


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--harness-only", action="store_true", help="no GPU: plain torch in FlashAttention's place, small cases"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--remap", help="only this case of the graph test, as JSON; used by the program itself")
    arguments = parser.parse_args()
    if arguments.remap:
        name, page_size, rounds, tail = json.loads(arguments.remap)
        torch.cuda.set_device(arguments.device)
        shape = next(s for s in SHAPES if s.name == name)
        print(json.dumps(remap_under_graph(shape, page_size, rounds, arguments.device, tail)))
        return
    attention = _attention(arguments.harness_only)
    device = "cpu" if arguments.harness_only else f"cuda:{arguments.device}"
    begun = time.monotonic()
    result: dict[str, Any] = {"compare": [], "store": [], "speed": [], "remap": [], "move": [], "fused": []}
    shapes = (Shape("tiny", 2, 8, 2, 16),) if arguments.harness_only else SHAPES
    sizes = (16, 64) if arguments.harness_only else (16, 64, 128)
    for shape, page_size, phase in itertools.product(shapes, sizes, ("decode", "extend")):
        for seed, splits, unused in itertools.product(range(arguments.seeds), (0, 1), ("nan", "finite")):
            case = compare(attention, shape, page_size, phase, splits, seed, unused, device)
            result["compare"].append(case)
    if not arguments.harness_only:
        for shape, page_size, tokens in itertools.product(SHAPES, (16, 64), (1, 256, 4096)):
            result["store"].append(store_case(shape, page_size, tokens, device))
        for shape, page_size in itertools.product(SHAPES, (16, 64)):
            result["speed"].append(speed(attention, shape, page_size, [4096] * 32, [1] * 32, device))
            result["speed"].append(speed(attention, shape, page_size, [4096] * 4, [2048] * 4, device))
        for shape in SHAPES:
            result["move"].append(move_envelopes(shape, 16, 256, device))
        for page_size in (1, 16):
            result["fused"].append(fused_store(SHAPES[2], page_size, device))
        for shape, page_size, tail in itertools.product(SHAPES, (16, 64), (False, True)):
            result["remap"].append(_remap_in_own_process(shape, page_size, 20, arguments.device, tail))
    result["seconds"] = round(time.monotonic() - begun, 1)
    _print(result)
    report.write(arguments.out, "gpu_contracts_attention", arguments.commit, result)


if __name__ == "__main__":
    main()
