"""HTTP as no library would send it: bytes over a socket, to every path."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

from testing.fuzz.outcome import SurfaceOutcome
from testing.patience import PATIENCE_S

_AT_ONCE = 8
_HANGING = 30
_NOT_OURS = frozenset((503, 504, 505))
"""What a server may say of 5xx: nothing else is documented."""
_ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e400, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**40, float("nan"), float("inf")),
    *("", "a", "\0", "\ud800", "😀" * 100, "x" * 20_000, [], [[]], {}, {"a": {"b": []}}, [None], [-1], [2**63]),
    *([0] * 3000, ["a"] * 600, [[1], ["a"]], [{"type": "text"}], [{"type": "image_url", "text": "x"}]),
)
_PATHS = ("/", "//", "/v1", "/v1/models/%00", "/v1/models/../../metrics", "/v1/models/" + "%E2%82" * 50, "/ui/%2e%2e")
_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW", "get")
_ENCODINGS = ("gzip", "deflate", "x-gzip, deflate", "gzip, gzip", "br", "identity", "gzip;q=1", "\xff", ",")
_OFFERS = ("h2c", "websocket", "TLS/1.0", "h2c, foo", "\xff", "")
_KINDS = ("application/json", "text/plain", "multipart/form-data; boundary=x", "", "application/json; charset=utf-16")


class Requests:
    """Draws them."""

    def __init__(self, draw: random.Random, model: str, key: str, most_body_bytes: int) -> None:
        self.draw = draw
        self._key = key
        self._most_body_bytes = most_body_bytes
        chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
        self._bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {**chat, "temperature": 0, "n": 1, "stop": "x", "logprobs": True, "seed": 1},
            "/v1/completions": {"model": model, "prompt": "hi", "max_tokens": 2, "stop_token_ids": [1], "echo": True},
            "/v1/embeddings": {"model": model, "input": ["hi", "there"], "dimensions": 2, "encoding_format": "float"},
            "/v1/score": {"model": model, "query": "hi", "items": ["there", "you"], "label_token_ids": [1, 2]},
            "/v1/rerank": {"model": model, "query": "hi", "documents": ["there", {"text": "you"}], "top_n": 1},
            "/tokenize": {"model": model, "prompt": "hi"},
            "/detokenize": {"model": model, "tokens": [5, 6]},
        }
        self._gets = (
            "/v1/models",
            f"/v1/models/{model}",
            "/health",
            "/metrics",
            "/openapi.json",
            "/ui/",
            "/ui/state.json",
        )

    def next(self) -> bytes:
        ways = (self._odd_field, self._odd_field, self._odd_body, self._odd_head, self._odd_frame, self._odd_way)
        return self.draw.choice(ways)()

    def _head(self, method: str, path: str, *headers: str, kind: str = "application/json") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
        if kind:
            lines.append(f"content-type: {kind}")
        if self._key and self.draw.random() < 0.9:
            lines.append(f"authorization: Bearer {self._key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def _post(self, path: str, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
        return self._head("POST", path, f"content-length: {len(body)}", *headers, kind=kind) + body

    def _valid(self) -> tuple[str, dict[str, Any]]:
        path = self.draw.choice(list(self._bodies))
        return path, json.loads(json.dumps(self._bodies[path]))

    def _odd_field(self) -> bytes:
        """One value, or one inside it, is another."""
        path, body = self._valid()
        numbers = ["top_k", "min_p", "min_tokens", "top_logprobs", "max_completion_tokens", "n"]
        names = [*body, *numbers, "chat_template_kwargs"]
        for _ in range(self.draw.choice((1, 1, 2))):
            name = self.draw.choice(names)
            if name == "messages" and self.draw.random() < 0.7:
                body[name] = [{self.draw.choice(("role", "content", "tool_calls", "name")): self.draw.choice(_ODD)}]
            else:
                body[name] = self.draw.choice(_ODD)
        return self._post(path, json.dumps(body).encode())

    def _odd_body(self) -> bytes:
        path, body = self._valid()
        data = json.dumps(body).encode()
        depth = self.draw.choice((10, 150, 300, 100_000))
        cut = self.draw.randrange(len(data))
        odd = self.draw.choice(
            (
                data[:cut],
                data + b"}",
                b"\xff\xfe" + data,
                data.replace(b"hi", b"\xff\xfe\xed\xa0\x80"),
                b'{"a":' * depth + b"1" + b"}" * depth,
                b"[" * depth,
                b'{"model": ' + b"9" * 5000 + b"}",
                b'{"model": "a", "model": "b"}',
                self.draw.randbytes(300),
                b"",
                b"null",
                json.dumps("x" * self._most_body_bytes).encode(),
                data.decode().encode("utf-16"),
            )
        )
        return self._post(path, odd, kind=self.draw.choice(_KINDS))

    def _odd_head(self) -> bytes:
        path, body = self._valid()
        data = json.dumps(body).encode()
        name = self.draw.choice(
            ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-drop", "x-request-id", "traceparent", "accept")
        )
        value = self.draw.choice(
            (
                "0",
                "-1",
                "1",
                "9" * 30,
                "000000000001" + "9" * 6000,
                "late",
                "\xb2",
                "\xff",
                "%s",
                "x" * 20_000,
                "1.5",
                "",
            )
        )
        how = self.draw.randrange(8)
        if how <= 2:
            return self._post(path, data, f"{name}: {value}")
        if how == 3:
            auth = self.draw.choice(
                ("Bearer", "Bearer \xff", "Basic !!!", "Basic Og==", "Bearer " + "k" * 9000, "Digest x")
            )
            return self._post(self.draw.choice(("/ui/", path)), data, f"authorization: {auth}")
        if how == 4:
            return self._head(self.draw.choice(_METHODS), self.draw.choice((*_PATHS, *self._gets, path)))
        if how == 5:
            return self._head("GET", self.draw.choice(self._gets), f"{name}: {value}")
        if how == 6:
            return self._post(path, data, *(f"x-{number}: y" for number in range(self.draw.choice((100, 3000)))))
        return self._head("GET", "/" + "a" * self.draw.choice((8000, 70_000)))

    def _odd_frame(self) -> bytes:
        path, body = self._valid()
        data = json.dumps(body).encode()
        length = self.draw.choice(("-1", "x", str(2**63), str(2**70), "0", str(len(data) + 1), "1, 2"))
        chunk = b"%x\r\n%s\r\n" % (len(data), data)
        chunks = self.draw.choice(
            (
                chunk + b"0\r\n\r\n",
                chunk + b"0\r\n" + b"x-trailer: y\r\n" * 20_000 + b"\r\n",
                chunk[:-5],
                b"zz\r\n",
                b"f" * 17 + b"\r\n",
                b"5;" + b"e" * 70_000,
                b"-1\r\n",
                b"1\r\n{\r\n" * 2000 + b"0\r\n\r\n",
            )
        )
        return self.draw.choice(
            (
                self._head("POST", path, f"content-length: {length}") + data,
                self._head("POST", path, "transfer-encoding: chunked") + chunks,
                self._head("POST", path, "transfer-encoding: chunked", "content-length: 3") + chunks,
                self._head("POST", path, "expect: 100-continue", "content-length: 5") + b"{}   ",
                self._head("GET", "/health") * 3,
                self._head("GET", "/v1/models", "connection: upgrade", "upgrade: websocket"),
                b"GET /health\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"\x16\x03\x01" + self.draw.randbytes(100),
                b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000,
                b"GET / HTTP/1.1\r\n bad: folded\r\nno colon\r\n\r\n",
                self.draw.randbytes(100),
            )
        )

    def _odd_way(self) -> bytes:
        """What is valid, packed, offered by another protocol, asked for by a page, or at a path written in another
        way; or what looks so."""
        path, body = self._valid()
        data = json.dumps(body).encode()
        slashes = self.draw.choice(("", "/", "//", "%2F", "/."))
        path = self.draw.choice((path + slashes, "/" + path, path.replace("/", "//"), path.replace("/", "%2f")))
        headers = [f"x-request-id: {self.draw.choice(('a', 'x' * 200))}"]
        how = self.draw.randrange(4)
        if how == 0:
            packed = self.draw.choice(
                (
                    gzip.compress(data),
                    zlib.compress(data),
                    zlib.compress(data)[2:-4],
                    gzip.compress(gzip.compress(data)),
                )
            )
            bomb = gzip.compress(bytes(8 * self._most_body_bytes), 1)
            empty = gzip.compress(b"") * 3000
            data = self.draw.choice((packed, packed, packed[:-5], packed + b"x", bomb, empty, data, b""))
            headers.append(f"content-encoding: {self.draw.choice(_ENCODINGS)}")
        elif how == 1:
            headers += [f"connection: {self.draw.choice(('upgrade', 'Upgrade, HTTP2-Settings', 'close, upgrade'))}"]
            headers += [f"upgrade: {self.draw.choice(_OFFERS)}"] * self.draw.choice((1, 1, 2))
            if self.draw.random() < 0.3:
                chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
                return self._head("POST", path, "transfer-encoding: chunked", *headers) + chunked
            return self._post(path, data, *headers) * self.draw.choice((1, 2))
        elif how == 2:
            headers += [f"origin: {self.draw.choice(('http://page', 'null', '', chr(255), 'x' * 9000))}"]
            headers += [f"access-control-request-method: {self.draw.choice(_METHODS)}"]
            headers += [f"access-control-request-headers: {self.draw.choice(('a,b', ',' * 5000, chr(255)))}"]
            return self._head(self.draw.choice(("OPTIONS", "OPTIONS", "GET", "POST")), path, *headers)
        return self._post(path, data, *headers)


async def fuzz(host: str, port: int, requests: Requests, cases: int, outcome: SurfaceOutcome) -> None:
    """`cases` requests, each on a connection of its own; some are left half sent."""
    hanging: list[asyncio.StreamWriter] = []
    turns: Iterator[int] = iter(range(cases))
    try:
        await asyncio.gather(*(_work(host, port, requests, turns, hanging, outcome) for _ in range(_AT_ONCE)))
    finally:
        for writer in hanging:
            writer.close()


async def _work(
    host: str,
    port: int,
    requests: Requests,
    turns: Iterator[int],
    hanging: list[asyncio.StreamWriter],
    outcome: SurfaceOutcome,
) -> None:
    for _ in turns:
        sent = requests.next()
        outcome.cases += 1
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
        if len(hanging) < _HANGING and requests.draw.random() < 0.02:
            writer.write(sent[: requests.draw.randrange(len(sent))])
            hanging.append(writer)
            outcome.answers["left half sent"] += 1
            continue
        try:
            async with asyncio.timeout(PATIENCE_S):
                writer.write(sent)
                # Whoever waits for more of a request than there is hears that there is none.
                writer.write_eof()
                answer = await reader.read()
        except TimeoutError:
            outcome.hangs += 1
            outcome.fault(f"hangs: {sent[:300]!r}")
            continue
        except OSError as error:
            outcome.answers[f"closed: {type(error).__name__}"] += 1
            continue
        finally:
            writer.close()
        _judge(sent, answer, outcome)


def _judge(sent: bytes, answer: bytes, outcome: SurfaceOutcome) -> None:
    if not answer:
        outcome.answers["closed without an answer"] += 1
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    first = head.split(b"\r\n")[0].split(b" ")
    if len(first) < 2 or not first[1].isdigit():
        outcome.fault(f"not HTTP: {answer[:200]!r} to {sent[:200]!r}")
        return
    status = int(first[1])
    outcome.answers[str(status)] += 1
    if status >= 500 and status not in _NOT_OURS:
        outcome.fault(f"{status} {body[:200]!r}: {_shown(sent)!r}")
    json_error = status >= 400 and b"content-type: application/json" in head and sent[:5] != b"HEAD "
    if json_error and b"transfer-encoding" not in head and not _is_error(body):
        outcome.fault(f"{status} without OpenAI's form {body[:200]!r}: {_shown(sent)!r}")


def _shown(sent: bytes) -> bytes:
    head, _, body = sent.partition(b"\r\n\r\n")
    return head[:120] + b" | " + body[:400]


def _is_error(body: bytes) -> bool:
    """Of a body that may be followed by another answer."""
    try:
        error = json.JSONDecoder().raw_decode(body.decode())[0]["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return {"message", "type", "param", "code"} <= error.keys()
