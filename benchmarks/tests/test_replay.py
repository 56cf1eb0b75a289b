"""Replaying a trace over HTTP: against the real system with echo engines, and against servers that misbehave."""

import asyncio
import contextlib
import gzip
import json
import sys
from pathlib import Path

import pytest

from testing.systems.local import MODELS, world

ROOT = Path(__file__).resolve().parents[2]
HEADER = "arrival_s,model,prompt_tokens,output_tokens\n"


class Server:
    """Says that it serves "m"; each completion gets `tokens` events, then `last`, or waits for `release`."""

    def __init__(self, last=b'"finish_reason":"length"', tokens=3, held=False):
        self.asked = []
        self.release = asyncio.Event()
        if not held:
            self.release.set()
        token = b'data: {"choices":[{"text":"x","finish_reason":null}]}\n\n'
        usage = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens
        self._body = tokens * token + b"data: {" + last + b"}\n\n" + usage + b"data: [DONE]\n\n"

    async def __call__(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models"):
                    models = json.dumps({"data": [{"id": "m", "max_model_len": 64}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(models), models))
                    writer.close()
                    return
                fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:] if line)
                self.asked.append((fields, json.loads(await reader.readexactly(int(fields["content-length"])))))
                await self.release.wait()
                head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
                writer.write(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(self._body), self._body))
        writer.close()

    @contextlib.asynccontextmanager
    async def serving(self):
        server = await asyncio.start_server(self, "127.0.0.1", 0)
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        self.release.set()


@pytest.fixture
def replay(tmp_path):
    """Replays a trace: (exit status, what it printed, the JSON or None)."""

    async def run(url, lines, *arguments, models=None, slos=None):
        files = {"trace.csv": HEADER + lines, "models.json": json.dumps(models), "slos.json": json.dumps(slos)}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        given = ["--url", url, "--trace", str(tmp_path / "trace.csv"), "--out", str(tmp_path / "out.json")]
        given += ["--models", str(tmp_path / "models.json")] if models else []
        given += ["--slos", str(tmp_path / "slos.json")] if slos else []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.replay", *given, *arguments),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        out = tmp_path / "out.json"
        return process.returncode, said.decode(), json.loads(out.read_text()) if out.exists() else None

    return run


async def test_a_slice_through_the_whole_system_is_reported_by_model(replay):
    lines = "0.0,left-out,5,5\n" + "".join(
        f"{1 + i / 10},{name},{20 + i},{5 + i}\n" for i, name in enumerate(("chat-a", "chat-b", "code", "chat-a"))
    )
    names = {"chat-*": MODELS[0], "*": MODELS[1]}
    slos = {MODELS[0]: {"ttft_ms": 60_000, "tpot_ms": 30_000}, MODELS[1]: {"ttft_ms": 0.001}}
    async with world("echo", devices={"cpu:0": 64 << 20}) as at:
        status, said, found = await replay(
            at.base, lines, "--from-s", "0.5", "--shadow", at.base, "--late-ms", "60000", models=names, slos=slos
        )
    assert status == 0, said
    assert len(found["systems"]) == 2
    for system in found["systems"]:
        assert system["all"]["requests"] == system["all"]["served"] == 4 and not system["failures"]
        assert system["models"][MODELS[0]]["attainment"] == 1.0
        assert system["models"][MODELS[1]]["ttft_attainment"] == 0.0
        assert system["models"][MODELS[1]]["tpot_attainment"] == 1.0
        assert [row[3] for row in system["samples"]["rows"]] == [5, 6, 7, 8] and system["other_length"] == 0
    assert found["valid"] and found["arguments"]["from_s"] == "0.5"


async def test_targets_go_along_scaled_and_prompts_are_of_their_length_and_of_the_seed(replay):
    server = Server()
    async with server.serving() as url:
        arguments = ("--slo-scale", "2", "--ids", "100:110")
        line = "0.0,m,7,3\n"
        status, said, _ = await replay(url, line, *arguments, slos={"m": {"ttft_ms": 150, "tpot_ms": 9.75}})
        await replay(url, line, *arguments)
        await replay(url, line, *arguments, "--seed", "1")
        await replay(url, line, *arguments, "--prompt-seed", "1")
    assert status == 0, said
    (headers, body), (bare, same), (_, other), (_, other_prompts) = server.asked
    assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("300", "20") and "x-slo-ttft-ms" not in bare
    assert len(body["prompt"]) == 7 and set(body["prompt"]) <= set(range(100, 110))
    assert body["max_tokens"] == 3 and body["ignore_eos"] and body["stream"]
    assert same["prompt"] == body["prompt"] != other["prompt"] == other_prompts["prompt"]


async def test_a_server_that_holds_all_connections_breaks_the_schedule_and_the_run_is_not_valid(replay):
    server = Server(held=True)
    async with server.serving() as url:
        lines = "0.0,m,5,3\n0.1,m,5,3\n"
        status, said, found = await replay(url, lines, "--connections", "1", "--late-ms", "20", "--time-out-s", "0.2")
    assert status == 3 and "NOT VALID" in said
    assert not found["valid"] and not found["systems"][0]["valid"]
    assert found["systems"][0]["failures"] == {"timed out": 2}


async def test_answers_of_another_length_and_faults_in_a_stream_are_counted(replay):
    async with Server(tokens=2).serving() as url:
        _, _, found = await replay(url, "0.0,m,5,3\n", "--late-ms", "60000")
        assert found["systems"][0]["other_length"] == 1 and found["systems"][0]["all"]["served"] == 1
    async with Server(last=b'"error":{"code":"engine_died"}').serving() as url:
        _, _, found = await replay(url, "0.0,m,5,3\n", "--late-ms", "60000")
    system = found["systems"][0]
    assert system["all"]["attainment"] == 0.0 and list(system["failures"]) == ["in the stream: engine_died"]


async def test_a_request_that_is_longer_than_the_context_is_clipped_and_counted(replay):
    server = Server()
    async with server.serving() as url:
        _, _, found = await replay(url, "0.0,m,500,3\n", "--late-ms", "60000")
    assert found["clipped"] == 1 and len(server.asked[0][1]["prompt"]) == 63


@pytest.mark.parametrize(
    ("lines", "names", "said"),
    [
        ("0.0,m,5,3\n1.0,n,5,3\n", None, "line 3: model 'n' is not in the catalogue"),
        ("1.0,m,5,3\n0.5,m,5,3\n", None, "line 3: time goes back, from 1 to 0.5 s"),
        ("0.0,m,-5,3\n", None, "line 2: prompt_tokens is -5"),
        ("0.0,m,5,3\n", {"m": "q"}, "'q' is not served; there are m"),
    ],
)
async def test_what_cannot_be_replayed_is_said_in_one_line_and_nothing_is_asked(replay, lines, names, said):
    server = Server()
    async with server.serving() as url:
        status, out, found = await replay(url, lines, models=names)
    assert status == 2 and said in out and len(out.splitlines()) == 1
    assert found is None and not server.asked


async def test_a_zipped_trace_is_read_as_well_and_a_server_that_is_not_there_is_said(replay, tmp_path):
    zipped = tmp_path / "trace.gz"
    zipped.write_bytes(gzip.compress((HEADER + "0.0,m,5,3\n").encode()))
    async with Server().serving() as url:
        status, said, found = await replay(url, "", "--trace", str(zipped), "--late-ms", "60000")
        assert status == 0 and found["systems"][0]["all"]["served"] == 1, said
    status, said, _ = await replay("http://127.0.0.1:9", "0.0,m,5,3\n")
    assert status == 2 and "does not say what it serves" in said
