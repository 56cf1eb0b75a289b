"""SGLang itself on KV in our layouts: the same greedy tokens and log-probabilities as on ordinary KV?

One engine for each configuration, each in a process of its own: random weights of a 1B shape, KV filled with NaN,
prefix cache and CUDA graphs on. Prompts go one by one (then the schedule cannot differ, and equality must be exact)
and all at once, twice, so that the second time prefixes come from the cache.

    python -m benchmarks.gpu.page_major_engine --out DIR --commit HASH
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.gpu import report

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    f"{backend}, {layout or 'per layer'}, {size}": {"attention_backend": backend, "page_size": size, "layout": layout}
    for backend, layouts, size in (
        ("fa3", ("", "page-major", "token-major"), 16),
        ("triton", ("", "token-major"), 16),
        ("fa3", ("", "page-major", "token-major"), 64),
    )
    for layout in layouts
}
"""`layout`: of ours, for the plugin (`engine_hooks.py`); empty: SGLang's own. The rest are arguments of SGLang's."""
BASE = "fa3, per layer, 16"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def prompts() -> list[list[int]]:
    """Eight prompts of uneven lengths; the last two share 640 tokens with the first."""
    chance = random.Random(7)
    made = [[chance.randrange(2, 32000) for _ in range(n)] for n in (1500, 7, 100, 333, 1024, 641)]
    return [*made, made[0][:640] + made[2], made[0][:640] + made[1]]


def run_engine(name: str, model: str, new_tokens: int) -> dict[str, Any]:
    """Body of one engine's process."""
    import sglang

    begun = time.perf_counter()
    engine = sglang.Engine(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_prefill_cuda_graph=True,
        cuda_graph_max_bs_decode=16,
        skip_server_warmup=True,
        mem_fraction_static=0.2,
        max_total_tokens=32768,
        chunked_prefill_size=512,
        log_level="warning",
        random_seed=0,
        **{key: value for key, value in CONFIGURATIONS[name].items() if key != "layout"},
    )
    started = time.perf_counter() - begun
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}

    def ask(ids: list[list[int]]) -> list[dict[str, Any]]:
        answers = engine.generate(input_ids=ids, sampling_params=sampling, return_logprob=True)
        return [
            {
                "tokens": a["output_ids"],
                "logprobs": [entry[0] for entry in a["meta_info"]["output_token_logprobs"]],
                "cached": a["meta_info"]["cached_tokens"],
            }
            for a in answers
        ]

    questions = prompts()
    result = {
        "name": name,
        "start_s": round(started, 1),
        "one by one": [ask([q])[0] for q in questions],
        "one by one, cached": [ask([q])[0] for q in questions],
        "together": ask(questions),
        "together, again": ask(questions),
    }
    engine.shutdown()
    return result


def _environment(folder: pathlib.Path, evidence: pathlib.Path) -> dict[str, str]:
    """SGLang finds a plugin by its distribution's entry point, so one is laid down beside the path."""
    distribution = folder / "page_major_hooks-0.1.dist-info"
    if not distribution.exists():
        distribution.mkdir()
        (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: page-major-hooks\nVersion: 0.1\n")
        entry = "[sglang.srt.plugins]\npage_major_hooks = benchmarks.gpu.engine_hooks:register\n"
        (distribution / "entry_points.txt").write_text(entry)
    path = os.pathsep.join([str(folder), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PAGE_MAJOR_EVIDENCE": str(evidence),
        "SGLANG_PLUGINS": "page_major_hooks",
    }


def _start(name: str, folder: pathlib.Path, new_tokens: int, log: pathlib.Path) -> subprocess.Popen[bytes]:
    answer = folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks.gpu.page_major_engine", "--out", str(answer), "--only", name]
    environment = _environment(folder, folder / f"{name}.evidence") | {"KV_LAYOUT": CONFIGURATIONS[name]["layout"]}
    with log.open("ab") as sink:
        return subprocess.Popen(
            [*command, "--model", str(folder / "model"), "--new-tokens", str(new_tokens)],
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )


def _collect(name: str, folder: pathlib.Path, process: subprocess.Popen[bytes], timeout: float) -> dict[str, Any]:
    try:
        status: int | str = process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        status = "timed out"
    answer, evidence = folder / f"{name}.json", folder / f"{name}.evidence"
    hooks = [json.loads(line) for line in evidence.read_text().splitlines()] if evidence.exists() else []
    if not answer.exists():
        return {"name": name, "failed": f"exit status {status}", "hooks": hooks}
    return {**json.loads(answer.read_text()), "hooks": hooks}


def compare(base: dict[str, Any], other: dict[str, Any], way: str, other_way: str | None = None) -> dict[str, Any]:
    """How many answers are equal token by token, and how far log-probabilities differ up to the first other token."""
    equal, same, total, worst = 0, 0, 0, 0.0
    for a, b in zip(base[way], other[other_way or way], strict=True):
        prefix = next(
            (i for i, (x, y) in enumerate(zip(a["tokens"], b["tokens"], strict=True)) if x != y), len(a["tokens"])
        )
        equal += prefix == len(a["tokens"])
        same += prefix
        total += len(a["tokens"])
        pairs = zip(a["logprobs"][:prefix], b["logprobs"][:prefix], strict=True)
        worst = max([worst, *(abs(x - y) for x, y in pairs)])
    return {
        "answers_equal": equal,
        "answers": len(base[way]),
        "tokens_until_differing": same,
        "tokens": total,
        "logprob_gap": worst,
    }


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CONFIGURATIONS), help="run one engine here; used by the program itself")
    parser.add_argument("--model", default="")
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.only:
        arguments.out.write_text(json.dumps(run_engine(arguments.only, arguments.model, arguments.new_tokens)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "engines.log"
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        # The first one alone: it compiles what the others then find.
        runs = {BASE: _collect(BASE, folder, _start(BASE, folder, arguments.new_tokens, log), 240)}
        others = [name for name in CONFIGURATIONS if name != BASE]
        processes = {}
        for name in others:
            processes[name] = _start(name, folder, arguments.new_tokens, log)
            time.sleep(3)  # they look at the free memory when they start; let each take its own first
        runs |= {name: _collect(name, folder, process, 240) for name, process in processes.items()}
    rows, comparisons = [], []
    pairs = [
        (BASE, BASE, "together", "together, again"),
        (BASE, BASE, "one by one", "together"),
        *(
            (BASE, f"fa3, {layout}, 16", way, None)
            for layout in ("page-major", "token-major")
            for way in ("one by one", "one by one, cached", "together", "together, again")
        ),
        *(
            ("fa3, per layer, 64", f"fa3, {layout}, 64", way, None)
            for layout in ("page-major", "token-major")
            for way in ("one by one", "one by one, cached")
        ),
        *(
            ("triton, per layer, 16", "triton, token-major, 16", way, None)
            for way in ("one by one", "one by one, cached")
        ),
        (BASE, "triton, token-major, 16", "one by one", None),
    ]
    for first, second, way, other_way in pairs:
        if "failed" in runs[first] or "failed" in runs[second]:
            continue
        outcome = compare(runs[first], runs[second], way, other_way)
        comparisons.append({"first": first, "second": second, "way": way, "other_way": other_way or way, **outcome})
        share = f"{outcome['answers_equal']}/{outcome['answers']}"
        tokens = f"{outcome['tokens_until_differing']}/{outcome['tokens']}"
        rows.append((first, second, way, other_way or way, share, tokens, f"{outcome['logprob_gap']:.2e}"))
    header = (
        "first",
        "second",
        "first asked",
        "second asked",
        "equal",
        "tokens until differing",
        "log-prob gap before that",
    )
    report.table("greedy answers", header, rows)
    for run in runs.values():
        cached = [a["cached"] for a in run.get("one by one, cached", [])]
        print(
            run["name"],
            run.get("failed") or f"started in {run['start_s']} s",
            cached,
            run["hooks"][-1:],
        )
    report.write(
        arguments.out,
        "gpu_contracts_engine",
        arguments.commit,
        {"runs": list(runs.values()), "comparisons": comparisons},
    )


if __name__ == "__main__":
    main()
