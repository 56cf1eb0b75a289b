"""What SGLang's requests say -> token chunks. Stands where SGLang gathers a step's tokens for its detokenizer, and
where it has its sockets. Imports SGLang: only the engine process may."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from gpu_scheduler.engines.sglang.base.request_table import LiveRequest, RequestTable
from protos import common_pb2, engine_pb2

Logprobs = tuple[Sequence[float], Sequence[Any], Sequence[Any]]
"""Of some tokens: their own, and for each the best ones' values and ids (None or empty where not asked for)."""
_SCORED_TOGETHER = 256
"""Tokens of a prompt whose log-probabilities share a message: with 20 of each 60 KB, which nobody is held up by."""


class Outputs:
    """A step's tokens leave in one message, which is made in place: this runs for every token."""

    def __init__(
        self,
        request_table: RequestTable,
        send: Callable[[engine_pb2.FromEngine], None],
        on_probe: Callable[[str, list[int], list[float], bool], None],
    ) -> None:
        self._request_table = request_table
        self._send = send
        self._on_probe = on_probe
        """Tokens of a request that is not in the book: the engine's own."""
        self.stopped: dict[str, Sequence[int]] = {}
        """Of withheld requests that SGLang let go of, by rid: prompt and all that was said."""

    def stream(self, requests: Iterable[Any], skipped: Any = None) -> None:
        """What SGLang's requests have said since they were last here. One call is one step."""
        message = engine_pb2.FromEngine()
        for request in requests:
            # Where steps overlap, one that has ended comes once more.
            if request is skipped or request.finished_output:
                continue
            reason, said = request.finished_reason, request.output_ids
            begin, end = request.send_token_offset, len(said)
            if reason is not None:
                request.finished_output = True
                if request.finished_len is None:
                    request.finished_len = end
                end = min(end, request.finished_len)
                entry = self._request_table.by_rid(request.rid)
                if entry is not None and entry.withheld and isinstance(reason, FINISH_ABORT):
                    if _impossible(reason.to_json()):
                        entry.withheld = False  # it has no prompt any more, so that there is nothing to wait for
                    else:
                        self.stopped[request.rid] = [*request.origin_input_ids, *said[:end]]
            request.send_token_offset = end
            self.add(
                message,
                request.rid,
                said[begin:end],
                reason.to_json() if reason is not None else None,
                request.cached_tokens,
                _logprobs(request, begin, end) if request.return_logprob else None,
            )
        self.send(message)

    def embeddings(self, requests: Iterable[Any]) -> None:
        """What has become of prompts to embed, as `stream`."""
        message = engine_pb2.FromEngine()
        for request in requests:
            reason = request.finished_reason
            if reason is None or request.finished_output:  # its prompt takes several steps, or was told
                continue
            request.finished_output = True
            aborted, entry = isinstance(reason, FINISH_ABORT), self._request_table.by_rid(request.rid)
            vector: Sequence[float] = () if aborted else request.embedding
            if entry is None:
                self._on_probe(request.rid, [], list(vector), True)
                continue
            chunk = message.tokens.chunks.add(request_id=entry.request_id, embedding=vector)
            if aborted:
                finish(chunk, entry, reason.to_json())
            else:
                chunk.finish = common_pb2.STOP
                chunk.prompt_tokens, chunk.cached_tokens = entry.prompt_tokens, request.cached_tokens
            self._request_table.close(entry)
        self.send(message)

    def add(
        self,
        message: engine_pb2.FromEngine,
        rid: str,
        token_ids: Sequence[int],
        reason: dict[str, Any] | None,
        cached_tokens: int,
        logprobs: Logprobs | None,
    ) -> None:
        """One request's tokens of this step; `reason` is SGLang's, if it has ended."""
        entry = self._request_table.by_rid(rid)
        if entry is None:
            values = [float(value) for value in logprobs[0]] if logprobs is not None else []
            self._on_probe(rid, list(token_ids), values, reason is not None)
            return
        if reason is not None and entry.withheld and reason["type"] == "abort":
            self._request_table.close(entry)
            reason = None
        if reason is not None and _impossible(reason):
            # SGLang has drawn one, of a prompt that was none: what waits for its grammar ends so too, whoever ends it.
            token_ids, logprobs = (), None
        if not token_ids and reason is None:
            return
        chunk = message.tokens.chunks.add()
        chunk.request_id = entry.request_id
        # A message's constructor takes several times as long.
        for token in token_ids:
            chunk.token_ids.append(token)
        if not entry.told:
            entry.told = True
            chunk.prompt_tokens = entry.prompt_tokens
            chunk.cached_tokens = cached_tokens
        if logprobs is not None:
            own, *best = logprobs
            _add_logprobs(chunk.logprobs, own[: len(chunk.token_ids)], *best)
        if reason is not None:
            finish(chunk, entry, reason)
            self._request_table.close(entry)

    def prompt_scored(self, rid: str, logprobs: Logprobs) -> None:
        """The next tokens of a request's prompt. They leave before the end of the step that computed them, as they are
        many: of a whole prompt with 20 for each token it would be tens of megabytes."""
        entry = self._request_table.by_rid(rid)
        if entry is None:
            return
        for begin in range(0, len(logprobs[0]), _SCORED_TOGETHER):
            message = engine_pb2.FromEngine()
            chunk = message.tokens.chunks.add(request_id=entry.request_id)
            _add_logprobs(chunk.prompt_logprobs, *(part[begin : begin + _SCORED_TOGETHER] for part in logprobs))
            self._send(message)

    def send(self, message: engine_pb2.FromEngine) -> None:
        """Nothing, if nobody said anything."""
        if message.HasField("tokens"):
            self._send(message)

    def send_output(self, output: Any, _received: Any = None) -> None:
        """What SGLang writes to its sockets. Everything but aborts (answers to its own control messages) has no reader
        here."""
        if isinstance(output, AbortReq):
            self._aborted(output)

    def _aborted(self, output: AbortReq) -> None:
        """A request that never ran, or whose prefill was stopped."""
        entry = self._request_table.by_rid(output.rid or "")
        if entry is None:
            return
        message = engine_pb2.FromEngine()
        chunk = message.tokens.chunks.add(request_id=entry.request_id)
        reason = output.finished_reason
        finish(chunk, entry, dict(reason) if reason else {"type": "abort", "message": "aborted"})
        self._request_table.close(entry)
        self._send(message)


def finish(chunk: common_pb2.TokenChunk, entry: LiveRequest, reason: dict[str, Any]) -> None:
    """Maps SGLang's finish reason. An abort that we asked for ends as we meant it."""
    kind = reason.get("type")
    if kind == "stop":
        chunk.finish = common_pb2.STOP
    elif kind == "length":
        chunk.finish = common_pb2.LENGTH
    elif entry.ending:
        chunk.finish, chunk.error = entry.ending, entry.error
    else:
        chunk.finish = common_pb2.REJECTED if _impossible(reason) else common_pb2.FAILED
        chunk.error = str(reason.get("message") or "aborted")


def _impossible(reason: dict[str, Any]) -> bool:
    return reason.get("type") == "abort" and reason.get("status_code") == HTTPStatus.BAD_REQUEST


def _logprobs(request: Any, begin: int, end: int) -> Logprobs:
    said = request.logprob
    return (
        said.output_token_logprobs_val[begin:end],
        said.output_top_logprobs_val[begin:end],
        said.output_top_logprobs_idx[begin:end],
    )


def _add_logprobs(told: Any, own: Sequence[float], best_values: Sequence[Any], best_ids: Sequence[Any]) -> None:
    """To `told`, a message's list of TokenLogprob."""
    for k, logprob in enumerate(own):
        one = told.add(logprob=logprob)
        if k < len(best_values):
            for value, token in zip(best_values[k] or (), best_ids[k] or (), strict=True):
                one.top.add(token_id=token, logprob=value)
