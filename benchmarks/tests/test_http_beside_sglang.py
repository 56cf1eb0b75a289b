"""Prism over HTTP beside SGLang's own server: what surrounds the servers, and bench_serving itself."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from benchmarks.gpu import bench_serving, cpu_watch, http_needed, shapes, stock_server
from benchmarks.gpu import http_beside_sglang as http
from benchmarks.gpu.bench_serving import Load, load
from benchmarks.gpu.cpu_watch import Seen, Task
from benchmarks.gpu.pairs import interval
from testing.ports import free_port


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("16", Load("16", 16.0, 160)),
        ("0.5", Load("0.5", 0.5, 5)),
        ("x400", Load("x400", math.inf, 400)),
        ("16+second", Load("16+second", 16.0, 160, second=True)),
    ],
)
def test_a_load_is_a_rate_or_a_number_at_once(name, expected):
    assert load(name, 10.0) == expected


@pytest.mark.parametrize("name", ["", "fast", "0", "-1", "inf", "x", "x4.5", "16+", "16+third"])
def test_other_loads_are_refused(name):
    with pytest.raises(ValueError):
        load(name, 10.0)


def test_each_side_goes_first_in_every_other_round():
    assert [http.order(["a", "b"], number) for number in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_no_two_pairs_of_a_run_have_the_same_prompts():
    seeds = {http.seed(base, at, number) for base in (1, 2) for at in range(5) for number in (*range(20), 900, 901)}
    assert len(seeds) == 2 * 5 * 22 and max(seeds) < 1 << 32


def test_both_sides_are_asked_alike():
    asked = [
        bench_serving.arguments(base, "m", Path("/m"), load("x400", 10.0), (256, 128), 7, Path("/out"))
        for base in ("http://a", "http://b")
    ]
    differing = {pair for pair in zip(*asked, strict=True) if pair[0] != pair[1]}
    assert differing == {("http://a", "http://b")}
    assert asked[0][asked[0].index("--request-rate") + 1] == "inf"


def window(side, load="16", number=0, tpot=8.0, **more):
    row = {"side": side, "load": load, "round": number, "warm_up": False, "failed": 0}
    return row | dict.fromkeys(http.MEASURES.values(), 40.0) | {"mean_tpot_ms": tpot} | more


def rows_of(windows, measure="mean TPOT, ms"):
    return {row["load"]: row for row in http.summary(windows) if row["measure"] == measure}


def test_ratios_are_of_the_windows_of_a_pair():
    windows = [
        *(window("prism", number=number, tpot=tpot) for number, tpot in enumerate((8.0, 9.0, 10.0))),
        *(window("sglang", number=number, tpot=tpot) for number, tpot in ((2, 20.0), (1, 10.0), (0, 10.0))),
    ]
    row = rows_of(windows)["16"]
    expected = interval([0.8, 0.9, 0.5])
    assert row["ratios"] == [0.8, 0.9, 0.5]
    assert (row["ratio"], row["half"]) == (expected.mean, expected.half)
    assert (row["prism"], row["sglang"]) == (9.0, pytest.approx(40 / 3))


def test_a_window_that_came_to_nothing_takes_its_pair_along():
    windows = [window(side, number=number) for side in ("prism", "sglang") for number in range(3)]
    windows[4] = {key: windows[4][key] for key in ("side", "load", "round", "warm_up")} | {"error": "no server"}
    assert len(rows_of(windows)["16"]["ratios"]) == 2


def test_a_warm_up_does_not_count():
    assert http.summary([window("prism", warm_up=True), window("sglang", warm_up=True)]) == []


def test_a_side_alone_has_its_means_and_no_ratio():
    row = rows_of([window("prism", tpot=8.0), window("prism", number=1, tpot=10.0, failed=2)])["16"]
    assert (row["prism"], row["sglang"], row["ratio"], row["half"], row["ratios"]) == (9.0, None, None, None, [])
    assert row["failed"] == 2


def test_one_pair_is_a_ratio_without_an_interval_and_all_of_it_is_json():
    rows = http.summary([window("prism", tpot=8.0), window("sglang", tpot=10.0), window("prism", "x4")])
    (row,) = (row for row in rows if row["load"] == "16" and row["measure"] == "mean TPOT, ms")
    assert (row["ratio"], row["half"]) == (0.8, None)
    json.dumps(rows, allow_nan=False)
    http.show("8b", rows)


def test_a_shape_has_a_folder_of_ours_and_a_named_folder_is_somebodys(tmp_path):
    assert http.named("8b", tmp_path) == http.Model("8b", tmp_path / "8b", "8b")
    assert http.named(f"small={tmp_path}", Path("elsewhere")) == http.Model("small", tmp_path)
    with pytest.raises(ValueError, match="neither"):
        http.named("9b", tmp_path)


@pytest.mark.parametrize(
    "wrong", [[], ["--loads", "fast"], ["--warm-up", "x"], ["--models", "9b"], ["--second", "9b"]], ids=str
)
def test_arguments_that_cannot_be_are_refused_at_once(wrong, tmp_path):
    with pytest.raises(SystemExit):
        http.parse(["--out", str(tmp_path), *wrong] if wrong else [])


def test_there_is_no_second_model_where_no_load_wants_it(tmp_path):
    given = http.parse(["--out", str(tmp_path), "--loads", "16,x400"])
    assert given.second is None and given.models == ["8b", "135m"]
    assert http.parse(["--out", str(tmp_path), "--rehearse"]).device == "cpu:0"


def test_a_fresh_start_wants_caches_without_kernels(tmp_path):
    fresh = ["--out", str(tmp_path), "--fresh", "--caches", str(tmp_path / "caches")]
    assert http.parse(fresh).fresh
    folder = http.cache_folders(tmp_path / "caches", "prism")["TRITON_CACHE_DIR"]
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(b"1234")
    with pytest.raises(SystemExit):
        http.parse(fresh)


def test_sides_keep_their_kernels_apart(tmp_path):
    ours, theirs = (http.cache_folders(tmp_path, side) for side in ("prism", "sglang"))
    assert ours.keys() == theirs.keys() and not set(ours.values()) & set(theirs.values())
    assert http.cache_folders(None, "prism") == {}


# --- SGLang's server


def test_flags_are_what_a_command_line_has():
    named = {"page_size": 16, "sleep_on_idle": True, "disable_cuda_graph": False, "dtype": None, "bs": [1, 2]}
    assert stock_server.flags(named) == ["--page-size", "16", "--sleep-on-idle", "--bs", "1", "2"]


def test_sglang_is_given_what_our_engines_give_it(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    said = " ".join(stock_server.server_flags(Path("/m"), "m", "cuda:1", 16 << 30, 1000))
    for part in (
        "--attention-backend fa3 --page-size 16 --chunked-prefill-size 2048 --max-running-requests 256",
        "--cuda-graph-bs-decode 1 2 4 8",
        "--cuda-graph-bs-prefill 16 32 64 128 192 256 384 512",
        "--max-total-tokens 1000",
        "--base-gpu-id 1",
    ):
        assert part in said
    # What makes our engine ours, or its memory.
    for part in ("priority", "page-major", "load-format", "skip-tokenizer", "sampling-backend"):
        assert part not in said


# --- who has the cores


def task(ticks, parent=1, name="python", ended=0, started=5):
    return Task(name, parent, ticks, ended, started)


def test_a_line_of_stat_is_read_whatever_the_name():
    fields = "S 7 0 0 0 0 0 0 0 0 0 11 22 33 44 20 0 1 0 555 0"
    assert cpu_watch.parse(f"12 (a) b (c) {fields}") == Task("a) b (c", 7, 33, 77, 555)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/usr/bin/python3", "-m", "gateway", "--config", "x"], "gateway"),
        (["sglang::scheduler"], "sglang::scheduler"),
        (["python", "/x/torch/_inductor/compile_worker/__main__.py", "--kind=fork"], "torch compile_worker"),
        (["python", "-c", "from multiprocessing.spawn import spawn_main"], "multiprocessing child"),
        (["ptxas", "-o", "x"], "named"),
        ([""], "named"),
    ],
)
def test_a_process_is_called_what_it_runs(command, expected):
    assert cpu_watch.called(command, "named") == expected


def test_who_was_busy_between_two_looks():
    second = cpu_watch.TICKS_PER_S
    before = {
        10: Seen(task(5 * second), "engine", {10: task(4 * second), 11: task(second)}),
        20: Seen(task(second, parent=10), "old"),
        30: Seen(task(second), "idle"),
    }
    after = {
        10: Seen(
            task(6 * second, ended=second), "engine", {10: task(5 * second), 11: task(second), 12: task(second // 2)}
        ),
        # The number of one that is gone, used again.
        20: Seen(task(second // 2, parent=10, started=9), "new"),
        30: Seen(task(second), "idle"),
    }
    rows = cpu_watch.busy(before, after, 2.0, {"prism": [10]})
    assert [(row["process"], row["side"], row["cores"], row["ended_children_cores"]) for row in rows] == [
        ("engine", "prism", 0.5, 0.5),
        ("new", "prism", 0.25, 0.0),
    ]
    assert rows[0]["threads"] == [[10, "python", 0.5], [12, "python", 0.25]]


def test_a_compiler_that_runs_is_seen_with_whoever_started_it(tmp_path):
    compiler = tmp_path / "ptxas"
    compiler.symlink_to("/bin/sleep")
    with subprocess.Popen([compiler, "60"]) as process:
        try:
            found = cpu_watch.compilers(cpu_watch.snapshot(), {"prism": [os.getpid()]})
        finally:
            process.kill()
    assert [row for (pid, _), row in found.items() if pid == process.pid] == [{"compiler": "ptxas", "side": "prism"}]


def test_files_are_counted_below_a_folder_and_none_where_there_is_no_folder(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "kernel.so").write_bytes(b"123")
    (tmp_path / "a" / "kernel.cubin").write_bytes(b"12345")
    assert cpu_watch.files({"a": tmp_path / "a", "c": tmp_path / "c"}) == {"a": [2, 8], "c": [0, 0]}


# --- what is needed


def test_a_machine_without_a_gpu_lacks_it_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    checks = http_needed.machine("cuda:0", [tmp_path / "models" / "8b"])
    assert {check.what: check.ok for check in checks if check.what != "disk"} == {"GPU memory": False, "nvcc": False}
    assert not http_needed.show(checks) and "MISSING" in capsys.readouterr().out
    assert http_needed.show(http_needed.machine("cpu:0", [tmp_path]))


@pytest.mark.sglang
async def test_an_engine_that_would_miss_a_module_is_seen_beforehand(monkeypatch):
    checks = await http_needed.ours()
    assert http_needed.show(checks) and "classes of models" in checks[-1].found
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    refused = await http_needed.engine()
    assert not refused.ok and "did not take" in refused.found


# --- prompts and bench_serving


def test_a_text_of_words_of_a_shape_is_as_many_tokens(tmp_path):
    from tokenizers import Tokenizer

    shapes.write(tmp_path, "tiny")
    shapes.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 4096
    for first in (256, 1000, 3840):
        ids = list(range(first, first + 256))
        assert tokenizer.encode(tokenizer.decode(ids)).ids == ids
    assert all(tokenizer.decode([number]) for number in range(4096))


SEEN = web.AppKey("seen", list)


async def models(request):
    return web.json_response({"data": [{"id": "tiny"}]})


async def completions(request):
    """As OpenAI's server streams them; every other request is refused."""
    body = await request.json()
    seen = request.app[SEEN]
    seen.append(body)
    if len(seen) % 2 == 0:
        return web.Response(status=503, text="not now")
    answer = web.StreamResponse()
    await answer.prepare(request)
    for number in range(body["max_tokens"]):
        event = {"choices": [{"index": 0, "text": f" word{number}"}]}
        await answer.write(f"data: {json.dumps(event)}\n\n".encode())
    await answer.write(b"data: [DONE]\n\n")
    return answer


@pytest.mark.sglang
async def test_bench_serving_asks_a_server_and_its_result_is_read(tmp_path):
    shapes.write(tmp_path / "model", "tiny")
    shapes.write_tokenizer(tmp_path / "model")
    app = web.Application()
    app[SEEN] = []
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()

    def said(seed, to):
        at = load("x4", 1.0)
        base = f"http://127.0.0.1:{port}"
        return bench_serving.arguments(base, "tiny", tmp_path / "model", at, (24, 5), seed, to)

    try:
        async with bench_serving.client(tmp_path / "model", tmp_path / "client.log") as client:
            assert await client.told(120.0) == {"status": 0}
            for seed in (7, 7, 8):
                to = tmp_path / f"{seed}.jsonl"
                done = await client.ask(said(seed, to), tmp_path / "bench.log", 60.0)
                assert done["status"] == 0 and done["cpu_s"] > 0, (tmp_path / "bench.log").read_text()
            too_long = await client.ask(said(9, tmp_path / "9.jsonl"), tmp_path / "bench.log", 0.01)
            assert too_long["status"] < 0  # by a signal
    finally:
        await runner.cleanup()
    seen = app[SEEN]
    assert {(body["max_tokens"], body["temperature"], body["ignore_eos"]) for body in seen} == {(5, 0.0, True)}
    prompts = [sorted(body["prompt"] for body in seen[at : at + 4]) for at in (0, 4, 8)]
    assert prompts[0] == prompts[1] != prompts[2]
    result = bench_serving.result((tmp_path / "7.jsonl").read_text())
    assert result["completed"] == result["failed"] == len(result["ttft_ms"]) == len(result["tpot_ms"]) == 2
    assert "not now" in result["errors"][0]
    assert result.keys() >= set(http.MEASURES.values())
    json.dumps(result, allow_nan=False)


def test_a_file_without_a_result_is_none():
    with pytest.raises(ValueError, match="no result"):
        bench_serving.result("\n")
