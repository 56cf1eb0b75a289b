"""A request as its gpu_scheduler holds it, from the gateway's Submit to its last chunk."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.policy.adapter_room import adapter_key
from gpu_scheduler.policy.group_facts import ArrivedRequest
from gpu_scheduler.queue.streams import GatewayStream
from gpu_scheduler.telemetry.traces import RequestTrace
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2


@dataclass(slots=True, eq=False)
class GroupRequest:
    """One request. `id` is the gpu_scheduler's (unique for the life of the process), `gateway_id` the gateway's. Times
    are seconds on the dispatcher's clock."""

    id: str
    gateway_id: str
    stream: GatewayStream
    model: str
    token_ids: list[int]
    sampling: common_pb2.Sampling
    arrival: float
    deadline: float
    """Second at which its first token is due; +inf if it has no target. Not used if there are `resumed_tokens`."""
    expires: float
    drop_late: bool
    ttft_ms: int
    tpot_ms: int
    resumed_tokens: int
    adapter: common_pb2.Adapter | None
    """The adapter that it is for, of `model`; None: none."""
    embed: bool
    """True if the prompt's embedding is wanted: nothing is decoded."""
    engine: EngineProcess | None = None
    sent_at: float = 0.0
    """When it was sent to the engine."""
    answered: bool = False
    """True once this group has sent a first token of it."""
    paused_at: float = 0.0
    """When its engine, for want of KV memory, put it back into the queue or took it out of the running batch; 0: no
    such pause lasts."""
    pause_reason: str = ""
    emitted: list[int] = field(default_factory=list)
    scored: int = 0
    """Prompt tokens whose log-probabilities were passed on."""
    cached_tokens: int = 0
    """Number of its first tokens whose KV came here before it, with a model that moved."""
    kv_address: str = ""
    """Address of the group that was given its KV, because the model leaves this one; empty: none was."""
    trace: RequestTrace | None = None

    @classmethod
    def of(
        cls,
        submit: gpu_scheduler_pb2.Submit,
        number: int,
        stream: GatewayStream,
        now: float,
        adapter: common_pb2.Adapter | None = None,
    ) -> GroupRequest:
        """`adapter`: the one that the request is for, by its name."""
        ttft_s = submit.slo.ttft_ms / 1e3
        left_s = submit.ttft_left_ms / 1e3
        timed = submit.has_target and submit.resumed_tokens == 0
        return cls(
            id=f"{stream.number}/{number}",
            gateway_id=submit.request_id,
            stream=stream,
            model=submit.model if adapter is None else adapter.base,
            token_ids=list(submit.token_ids),
            sampling=submit.sampling,
            # It entered the system when its target began to run, at its gateway.
            arrival=now - max(0.0, ttft_s - left_s) if timed else now,
            deadline=now + left_s if submit.has_target else inf,
            expires=now + submit.time_out_left_ms / 1e3 if submit.time_out_left_ms > 0 else inf,
            drop_late=submit.slo.drop_late,
            ttft_ms=submit.slo.ttft_ms,
            tpot_ms=submit.slo.tpot_ms,
            resumed_tokens=submit.resumed_tokens,
            embed=submit.embed,
            adapter=adapter,
        )

    @property
    def served_as(self) -> str:
        """The name that its client asked for: the model's, or the adapter's."""
        return self.model if self.adapter is None else self.adapter.name

    @property
    def prefixes(self) -> str:
        """The name of the prefixes that it shares: those of its model, or of the adapter."""
        return self.model if self.adapter is None else adapter_key(self.adapter.name, self.adapter.generation)

    @property
    def logged_id(self) -> str:
        """The request's id in logs of all processes: the gateway's, which numbers its attempts behind a last slash."""
        return self.gateway_id.rpartition("/")[0] or self.gateway_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens that an engine has to prefill if it starts now: the prompt and the tokens generated before a
        retraction."""
        return len(self.token_ids) + len(self.emitted)

    @property
    def decodes(self) -> bool:
        """Whether tokens are generated after the prompt."""
        return not (self.embed or self.sampling.prompt_only)

    @property
    def most_new_tokens(self) -> int:
        return max(0, self.sampling.max_new_tokens - len(self.emitted)) if self.decodes else 0

    def impossible(self, spec: common_pb2.ModelSpec) -> str:
        """Why this model can never answer the request; empty: it can."""
        if self.embed != spec.HasField("embedding"):
            makes = "text and no embeddings" if self.embed else "embeddings and no text"
            return f"model '{self.served_as}' makes {makes}"
        room = spec.context_tokens - self.decodes  # one token of the answer has to fit too
        if self.prompt_tokens == 0 or (self.prompt_tokens > room and spec.context_tokens > 0):
            return f"{self.prompt_tokens} prompt tokens do not fit a context of {spec.context_tokens}"
        if min(self.ttft_ms, self.tpot_ms) < 0:
            return f"targets of {self.ttft_ms} and {self.tpot_ms} ms make no sense"
        return ""

    def arrived(self) -> ArrivedRequest:
        """The facts by which the group's core handles the request."""
        return ArrivedRequest(
            self.id,
            self.model,
            self.arrival,
            self.prompt_tokens,
            self.most_new_tokens,
            deadline=self.deadline,
            tpot_s=self.tpot_ms / 1e3,
            resumed=self.resumed_tokens > 0,
            cached_tokens=self.cached_tokens,
            expires=self.expires,
            drop_late=self.drop_late,
        )

    def generate(self, priority: int) -> engine_pb2.Generate:
        """The command for an engine; after a retraction it continues behind the tokens generated so far."""
        sampling = self.sampling
        if self.emitted or self.scored:
            sampling = common_pb2.Sampling()
            sampling.CopyFrom(self.sampling)
            sampling.max_new_tokens = self.most_new_tokens
            if self.scored:
                sampling.prompt_logprobs_from += self.scored
            if sampling.prompt_logprobs_from >= len(self.token_ids):  # all were passed on
                sampling.ClearField("prompt_logprobs_from")
        return engine_pb2.Generate(
            request_id=self.id,
            token_ids=[*self.token_ids, *self.emitted],
            sampling=sampling,
            priority=priority,
            resumed_tokens=self.resumed_tokens + len(self.emitted),
            embed=self.embed,
            adapter=self.adapter,
        )

    def end(self, finish: common_pb2.Finish, error: str = "") -> None:
        """Sends the last chunk, without tokens."""
        self.stream.push(common_pb2.TokenChunk(request_id=self.gateway_id, finish=finish, error=error))

    def end_trace(self, now: float, finish: common_pb2.Finish, error: str) -> None:
        if self.trace is not None:
            self.trace.end(
                now,
                model=self.served_as,
                finish=finish,
                error=error,
                prompt_tokens=len(self.token_ids),
                output_tokens=len(self.emitted),
                resumed_tokens=self.resumed_tokens,
                deadline=inf if self.resumed_tokens else self.deadline,
            )
