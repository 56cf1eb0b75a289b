"""Turns the outputs of SGLang's requests into token chunks. Takes the place where SGLang gathers a step's tokens for
its detokenizer, and of its sockets. Imports SGLang: only the engine process may import this."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from gpu_scheduler.engines.sglang.base.request_table import LiveRequest, RequestTable
from protos import common_pb2, engine_pb2

Logprobs = tuple[Sequence[float], Sequence[Any], Sequence[Any]]
"""Log-probabilities of some tokens: their own, and for each the values and the ids of the best tokens (None or empty
where not requested)."""
_SCORED_TOGETHER = 256
"""Tokens of a prompt whose log-probabilities share a message: with the 20 best of each it has 60 KB, too little to hold
other messages up."""


class Outputs:
    """Sends a step's tokens in one message, which is filled in place, since this runs for every token."""

    def __init__(
        self,
        request_table: RequestTable,
        send: Callable[[engine_pb2.FromEngine], None],
        on_probe: Callable[[str, list[int], list[float], bool], None],
    ) -> None:
        self._request_table = request_table
        self._send = send
        self._on_probe = on_probe
        """Receives the output of requests that are not in the table, which are the engine's own: rid, tokens,
        log-probabilities or embedding, whether it has ended."""
        self.stopped: dict[str, Sequence[int]] = {}
        """Tokens of withheld requests that SGLang has let go of, prompt and all output, by rid."""

    def stream(self, requests: Iterable[Any], skipped: Any = None) -> None:
        """Sends the tokens that each request has since its last call. One call is one step; `skipped` is left out."""
        message = engine_pb2.FromEngine()
        for request in requests:
            # Where steps overlap, a request that has ended is passed once more.
            if request is skipped or request.finished_output:
                continue
            reason, said = request.finished_reason, request.output_ids
            begin, end = request.send_token_offset, len(said)
            if reason is not None:
                request.finished_output = True
                if request.finished_len is None:  # it was stopped from outside, or its grammar ended
                    # Behind a prompt without an answer SGLang puts a token that nobody drew.
                    request.finished_len = end if request.sampling_params.max_new_tokens else 0
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
                _of_labels(request) if reason is not None and request.return_logprob else (),
            )
        self.send(message)

    def embeddings(self, requests: Iterable[Any]) -> None:
        """Sends the embeddings of the requests whose prompts are computed."""
        message = engine_pb2.FromEngine()
        for request in requests:
            reason = request.finished_reason
            if reason is None or request.finished_output:  # its prompt takes several steps, or it was reported
                continue
            request.finished_output = True
            aborted, entry = isinstance(reason, FINISH_ABORT), self._request_table.by_rid(request.rid)
            made = () if aborted else request.embedding
            vector: Sequence[float] = [made] if isinstance(made, float) else made  # a cross-encoder makes one number
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
        of_labels: Sequence[float] = (),
    ) -> None:
        """Adds one request's tokens of this step to `message`. `reason` is SGLang's finish reason, if the request has
        ended; `of_labels` then has the log-probabilities of its label tokens."""
        entry = self._request_table.by_rid(rid)
        if entry is None:
            values = [float(value) for value in logprobs[0]] if logprobs is not None else []
            self._on_probe(rid, list(token_ids), values, reason is not None)
            return
        if reason is not None and entry.withheld and reason["type"] == "abort":
            self._request_table.close(entry)
            reason = None
        if reason is not None and _impossible(reason):
            # SGLang has drawn a token for a prompt that was none: a request that waits for its grammar ends so too,
            # however it ends.
            token_ids, logprobs, of_labels = (), None, ()
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
            chunk.label_logprobs.extend(of_labels)
            finish(chunk, entry, reason)
            self._request_table.close(entry)

    def prompt_scored(self, rid: str, logprobs: Logprobs) -> None:
        """Sends log-probabilities of the next tokens of a request's prompt. They leave before the end of the step that
        computed them: a whole prompt's, with 20 for each token, would be tens of megabytes."""
        entry = self._request_table.by_rid(rid)
        if entry is None:
            return
        for begin in range(0, len(logprobs[0]), _SCORED_TOGETHER):
            message = engine_pb2.FromEngine()
            chunk = message.tokens.chunks.add(request_id=entry.request_id)
            _add_logprobs(chunk.prompt_logprobs, *(part[begin : begin + _SCORED_TOGETHER] for part in logprobs))
            self._send(message)

    def send(self, message: engine_pb2.FromEngine) -> None:
        """Sends the message, unless it has no output."""
        if message.HasField("tokens"):
            self._send(message)

    def send_output(self, output: Any, _received: Any = None) -> None:
        """Takes what SGLang writes to its sockets. Everything but aborts (answers to its own control messages) has no
        reader here."""
        if isinstance(output, AbortReq):
            self._aborted(output)

    def _aborted(self, output: AbortReq) -> None:
        """Reports the end of a request that never ran, or whose prefill was stopped."""
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
    """Writes SGLang's finish reason to `chunk`. An abort that the engine asked for ends the way it was meant to
    (`entry.ending`)."""
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
    """Whether SGLang ended a request because no attempt can succeed."""
    return reason.get("type") == "abort" and reason.get("status_code") == HTTPStatus.BAD_REQUEST


def _logprobs(request: Any, begin: int, end: int) -> Logprobs:
    """Log-probabilities of output tokens `begin` to `end` of a request."""
    said = request.logprob
    return (
        said.output_token_logprobs_val[begin:end],
        said.output_top_logprobs_val[begin:end],
        said.output_top_logprobs_idx[begin:end],
    )


def _of_labels(request: Any) -> Sequence[float]:
    """Log-probabilities of a request's label tokens after its prompt; empty if it has none, or was not computed."""
    rows: Sequence[Sequence[float]] = request.logprob.output_token_ids_logprobs_val
    return rows[0] if request.logprob.token_ids_logprob and rows else ()


def _add_logprobs(told: Any, own: Sequence[float], best_values: Sequence[Any], best_ids: Sequence[Any]) -> None:
    """Adds log-probabilities to `told`, a message's list of TokenLogprob."""
    for k, logprob in enumerate(own):
        one = told.add(logprob=logprob)
        if k < len(best_values):
            for value, token in zip(best_values[k] or (), best_ids[k] or (), strict=True):
                one.top.add(token_id=token, logprob=value)
