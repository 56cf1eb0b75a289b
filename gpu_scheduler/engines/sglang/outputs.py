"""SGLang's outputs -> token chunks. Stands where SGLang has its socket to the detokenizer. Imports SGLang: only
the engine process may."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput

from gpu_scheduler.engines.sglang.book import Book, Open
from protos import common_pb2

SendChunks = Callable[[list[common_pb2.TokenChunk]], None]


class Outputs:
    """What SGLang calls `send_to_detokenizer` and `send_to_tokenizer`. One call is one step."""

    def __init__(
        self, book: Book, send: SendChunks, on_probe: Callable[[str, list[int], list[float], bool], None]
    ) -> None:
        self._book = book
        self._send = send
        self._on_probe = on_probe
        """Tokens of a request that is not in the book: the engine's own."""

    def send_output(self, output: Any, _received: Any = None) -> None:
        """Everything else that SGLang tells (answers to its own control messages) has no reader here."""
        if isinstance(output, BatchTokenIDOutput):
            chunks = [chunk for i in range(len(output.rids or ())) if (chunk := self._tokens(output, i)) is not None]
            if chunks:
                self._send(chunks)
        elif isinstance(output, AbortReq):
            self._aborted(output)

    def _tokens(self, output: BatchTokenIDOutput, i: int) -> common_pb2.TokenChunk | None:
        rid = (output.rids or [])[i]
        token_ids = list(output.output_ids[i]) if output.output_ids is not None else []
        reason = output.finished_reasons[i]
        entry = self._book.by_rid(rid)
        if entry is None:
            logprobs = output.output_token_logprobs_val[i] if output.output_token_logprobs_val else []
            self._on_probe(rid, token_ids, [float(value) for value in logprobs], reason is not None)
            return None
        if not token_ids and reason is None:
            return None
        chunk = common_pb2.TokenChunk(request_id=entry.request_id, token_ids=token_ids)
        if not entry.told:
            entry.told = True
            chunk.prompt_tokens = entry.prompt_tokens
            chunk.cached_tokens = output.cached_tokens[i]
        if output.output_token_logprobs_val:
            _add_logprobs(chunk, output, i)
        if reason is not None:
            finish(chunk, entry, dict(reason))
            self._book.close(entry)
        return chunk

    def _aborted(self, output: AbortReq) -> None:
        """A request that never ran, or whose prefill was stopped."""
        entry = self._book.by_rid(output.rid or "")
        if entry is None:
            return
        chunk = common_pb2.TokenChunk(request_id=entry.request_id)
        reason = output.finished_reason
        finish(chunk, entry, dict(reason) if reason else {"type": "abort", "message": "aborted"})
        self._book.close(entry)
        self._send([chunk])


def finish(chunk: common_pb2.TokenChunk, entry: Open, reason: dict[str, Any]) -> None:
    """Maps SGLang's finish reason. An abort that we asked for ends as we meant it."""
    kind = reason.get("type")
    if kind == "stop":
        chunk.finish = common_pb2.STOP
    elif kind == "length":
        chunk.finish = common_pb2.LENGTH
    elif entry.ending:
        chunk.finish, chunk.error = entry.ending, entry.error
    else:
        impossible = reason.get("status_code") == HTTPStatus.BAD_REQUEST
        chunk.finish = common_pb2.REJECTED if impossible else common_pb2.FAILED
        chunk.error = str(reason.get("message") or "aborted")


def _add_logprobs(chunk: common_pb2.TokenChunk, output: BatchTokenIDOutput, i: int) -> None:
    chosen = output.output_token_logprobs_val[i]
    if not chosen:
        return
    best_values = output.output_top_logprobs_val[i] if output.output_top_logprobs_val else None
    best_ids = output.output_top_logprobs_idx[i] if output.output_top_logprobs_idx else None
    for k, logprob in enumerate(chosen[: len(chunk.token_ids)]):
        one = chunk.logprobs.add(logprob=logprob)
        if best_values and best_ids and k < len(best_values):
            for value, token in zip(best_values[k] or (), best_ids[k] or (), strict=True):
                one.top.add(token_id=token, logprob=value)
