"""What reads bodies and files, in this process: only the errors that each says it raises."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from gateway.access import keys
from gateway.errors import BadField
from gateway.openai.bodies import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from gateway.openai.embeddings import EmbeddingRequest
from gpu_scheduler.config import GpuSchedulerConfig
from loader.catalogue import catalogue
from loader.checkpoints import weight_files
from loader.checkpoints.errors import BrokenCheckpoint
from loader.images import disk_file
from protos import common_pb2, engine_pb2
from services.errors import Unavailable
from services.ipc.framing import _Unframe
from services.runtime import config
from sim.inputs import rates, trace
from testing.fuzz.mutate import Mutator
from testing.fuzz.outcome import SurfaceOutcome

_BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    "prompt": [[1, 2], [3]],
    "tokens": [1],
    "max_tokens": 5,
    "stop": ["a"],
    "seed": 1,
    "stop_token_ids": [7],
    "temperature": 0.5,
    "chat_template_kwargs": {"a": 1},
    "top_k": 3,
}
_CATALOGUE = b'[[model]]\nname = "a"\npath = "x"\nttft_ms = 5\npinned = true\ndevices = 2\nquota_bytes = 7\n'
_KEYS = b'[[key]]\nname = "ann"\nhash = "sha256:' + b"a" * 64 + b'"\nmodels = ["org/*"]\nrequests_per_minute = 6\n'
_SETTINGS = b'name = "g"\nlisten = "unix:/x"\ngroup = "a"\ndevices = ["cpu:0"]\n[engines]\nkind = "echo"\nlimit = 2\n'
_TENSORS = json.dumps({"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"a": "b"}})
_SAFE = struct.pack("<Q", len(_TENSORS)) + _TENSORS.encode() + bytes(16)
_TRACE = ",".join(trace.COLUMNS).encode() + b"\n0.1,a,5,6\n2,b,1000,1\n"
_RATES = ",".join(rates.COLUMNS).encode() + b"\na,5,600,100\nb,1,60,10\n"
_WORDS = (b"0", b"-1", b"99999999999999999999", b"1e400", b"nan", b"true", b"null", b"[", b"{", b'"', b"\n", b"\\u0000")
_MORE = (
    b"\xff",
    b"\xed\xa0\x80",
    b"=",
    b",",
    b"\0",
    b"'''",
    b"[[model]]",
    b"inf",
    b"0x7fffffffffffffffff",
    b"[" * 5000,
)
Case = Callable[[random.Random], bytes]


class _Everything:
    """A catalogue that has every model."""

    def find(self, name: str) -> object:
        return name


def mutated(seeds: tuple[bytes, ...]) -> Case:
    """Of one of these: bytes changed, taken out, doubled, or words put in."""

    def case(draw: random.Random) -> bytes:
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.randrange(1, 5)):
            at = draw.randrange(len(data) + 1)
            how = draw.randrange(5)
            if how == 0 and data:
                data[at % len(data)] = draw.randrange(256)
            elif how == 1:
                del data[at : at + draw.randrange(20)]
            elif how == 2:
                data[at:at] = data[at : at + draw.randrange(40)]
            elif how == 3:
                data[at : at + draw.randrange(6)] = draw.choice(_WORDS + _MORE)
            else:
                data[at:] = b"" if draw.random() < 0.3 else data[at:]
        return bytes(data)

    return case


def surfaces(folder: Path) -> Iterator[tuple[str, Case, Callable[[bytes], object], tuple[type[Exception], ...]]]:
    """(name, how cases are made, what decodes one, what that may raise)."""
    bodies = mutated((json.dumps(_BODY).encode(), json.dumps({**_BODY, "prompt": "x", "stream": True}).encode()))

    def ask(kind: type[ChatRequest] | type[CompletionRequest] | type[EmbeddingRequest]) -> Callable[[bytes], object]:
        return lambda data: parse(kind, data).request("id", common_pb2.Slo(), 0.0)

    yield "chat bodies", bodies, ask(ChatRequest), (BadField,)
    yield "completion bodies", bodies, ask(CompletionRequest), (BadField,)
    to_embed = mutated((b'{"model": "m", "input": [[1, 2], [3]], "dimensions": 2, "encoding_format": "base64"}',))
    yield "embedding bodies", to_embed, ask(EmbeddingRequest), (BadField,)
    yield "tokenize bodies", bodies, lambda data: parse(TokenizeRequest, data), (BadField,)
    yield "detokenize bodies", bodies, lambda data: parse(DetokenizeRequest, data), (BadField,)

    def filed(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        path = folder / name

        def decode(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return decode

    yield "catalogues", mutated((_CATALOGUE,)), filed("c.toml", catalogue.read), (ValueError,)
    yield "keys", mutated((_KEYS,)), filed("k.toml", lambda path: keys.load(str(path))), (ValueError,)
    yield "safetensors", mutated((_SAFE,)), filed("model.safetensors", weight_files.read_header), (BrokenCheckpoint,)
    header = _image_header(folder)
    yield "images", mutated((header,)), filed("image", disk_file.read_header), (disk_file.Damaged, OSError)
    read_settings = filed("s.toml", lambda path: config.read(GpuSchedulerConfig, path))
    yield "settings", mutated((_SETTINGS,)), read_settings, (ValueError,)
    yield "traces", mutated((_TRACE,)), filed("t.csv", lambda path: list(trace.rows(path))), (trace.TraceError,)
    read_rates = filed("r.csv", lambda path: rates.read(path, _Everything()))  # type: ignore[arg-type]
    yield "rates", mutated((_RATES,)), read_rates, (trace.TraceError,)

    mutator = Mutator(random.Random(0))

    def frames(draw: random.Random) -> bytes:
        mutator.draw = draw
        data = mutator.wire(engine_pb2.FromEngine)
        length = len(data) if draw.random() < 0.8 else draw.choice((0, 3, 1 << 31))
        return struct.pack("<I", length) + data

    yield "frames", frames, lambda data: _Unframe(engine_pb2.FromEngine).feed(data), (Unavailable,)


def _image_header(folder: Path) -> bytes:
    return disk_file.encode(disk_file.Header(**{name: _plain(kind) for name, kind in _fields().items()}))


def _fields() -> dict[str, str]:
    return {name: str(kind) for name, kind in disk_file.Header.__annotations__.items()}


def _plain(kind: str) -> object:
    return {"str": "x", "int": 4096, "bytes": b"manifest"}[kind]


def fuzz(
    case: Case, decode: Callable[[bytes], object], may_raise: tuple[type[Exception], ...], cases: int, seed: int
) -> SurfaceOutcome:
    """What is raised is told by its kind."""
    outcome, draw = SurfaceOutcome(), random.Random(seed)
    for _ in range(cases):
        data = case(draw)
        outcome.cases += 1
        try:
            decode(data)
            outcome.answers["taken"] += 1
        except UnicodeDecodeError as error:  # a ValueError, but none that names the file or says it in its own words
            outcome.fault(f"{type(error).__name__}: {error}: {data[:300]!r}")
        except may_raise as error:
            outcome.answers[f"refused: {type(error).__name__}"] += 1
        except Exception as error:  # which is what is looked for
            outcome.fault(f"{type(error).__name__}: {error}: {data[:300]!r}")
    return outcome
