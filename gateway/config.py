"""Configuration of a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from gateway.access import cors, quota_storage
from services.runtime.config import Config, ServerTls
from services.wording.addresses import Address, HttpAddress

Origin = Annotated[str, AfterValidator(cors.origin), "origin"]
QuotaStorageUri = Annotated[str, AfterValidator(quota_storage.check_uri), "address"]


class GatewayConfig(Config):
    """`listen` is the gRPC address of the inference API, `metrics` a second place for what /metrics serves anyway."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "routes_time_out_s": "a starting gateway waits for routes for 10 s at most",
        "activate_time_out_s": "a call to placement takes 10 s at most",
        "tokenizers_kept": "64 tokenizers stay in memory",
        "inline_characters": "prompts of up to 4096 characters are tokenized in the event loop",
    }

    http: HttpAddress
    """Address of the HTTP API, "host:port"; port 0: any that is free. Where a service manager hands a listening socket
    over (LISTEN_FDS), that one is served instead."""
    placement: Address
    """gRPC address of placement."""
    withdraw_s: float = Field(0.0, ge=0)
    """Part of `drain_s` in which a gateway that is stopped serves on as usual while /health and gRPC's health are
    negative: longer than a load balancer takes to notice. 0: without a load balancer, or if the service manager waits
    before it stops a gateway."""
    most_in_flight: int = Field(1024, ge=1)
    """Most answers that are under way at once (a request with n = 4 counts as four); more get 429."""
    park_time_out_s: float = Field(60.0, gt=0)
    """Longest time that a request waits for its model to come up, and a stream for another place when its own failed,
    before it gets 503. It has to be longer than a start from disk."""
    compile_time_out_s: float = Field(600.0, gt=0)
    """How long a request waits instead of `park_time_out_s`, where this is longer, while kernels are compiled for its
    model or the first engine of its group starts. Both are done once for a machine: nvcc takes a minute or two for one
    model, and an engine that reads its libraries from a cold disk as long."""
    reach_time_out_s: float = Field(15.0, gt=0)
    """Part of `park_time_out_s` that a request waits while no group can be reached that has its model or could bring it
    up: longer than a gpu_scheduler takes to restart, and placement to notice a node that is cut off."""
    request_time_out_s: float = Field(600.0, ge=0)
    """Longest time from a request's arrival to its last token; 0: no bound."""
    replay_limit: int = Field(4, ge=0)
    """Most times in a row that a request is replayed elsewhere after its place failed without a token. A request that
    kills its engine must not go round the whole cluster; one that was only near a fault gets tokens in between. A place
    that gives the model up for another one has not failed."""
    tokenizer_threads: int = Field(2, ge=1)
    """Threads that tokenize prompts of more than 4096 characters and load tokenizers; all but one of them also serve
    /tokenize and /detokenize."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Source of `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` that a request does not give.
    "model": the model's generation_config.json. "openai": a temperature of 1 and no limits."""
    max_tokens_beyond_context: Literal["refuse", "cut"] = "refuse"
    """What becomes of a request whose `max_tokens` (or `max_completion_tokens`) is more than its prompt leaves of the
    model's context. "refuse": it gets 400. "cut": it is answered as if it had asked for what is left, and ends with
    `finish_reason` "length" there. A prompt that leaves nothing is refused in any case."""
    waking_comment_s: float = Field(5.0, ge=0)
    """Time between comments (": waking", in the form of server-sent events) in a stream of which nothing comes while no
    group has its model up, and from its start to the first of them; 0: there are none. Clients and proxies give up
    where nothing comes. The first comment begins the answer: what goes wrong after it is an event in a stream whose
    status is 200."""
    most_body_bytes: int = Field(8 << 20, ge=1024)
    """Most bytes of one body, after decompression; a longer one gets 413."""
    most_bodies_bytes: int = Field(256 << 20, ge=1024)
    """Most bytes of all bodies that are still arriving, without the first 64 KiB of each; more get 503."""
    traces: bool = False
    """True: spans of requests are exported by OTLP over HTTP. OpenTelemetry's own variables
    (OTEL_EXPORTER_OTLP_ENDPOINT and others) say where to, and how many (docs/operate/monitoring.md)."""

    public_tls: ServerTls | None = None
    """Certificate that clients see at `http` and `listen`, if these are TCP; none: without TLS. (`tls` is for the way
    to placement and groups.)"""
    keys_file: str = ""
    """Path of the file of API keys (docs/operate/security.md); empty: everyone who reaches the gateway may ask for
    anything."""

    quota_storage: QuotaStorageUri = ""
    """Address of a Redis in which this gateway and others that name the same count what keys use in a minute
    (docs/operate/security.md): "redis://HOST:PORT/DATABASE", "rediss://" (TLS), "redis+unix:///PATH",
    "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE", "redis+cluster://HOST:PORT,HOST:PORT"; with ":PASSWORD@" before the
    host, which may be "${NAME}" of the environment. Empty: each gateway counts for itself."""
    usage_file: str = ""
    """Path of a file to which the gateway appends a JSON line for each request to a model that it took: time, key,
    request id, model, tokens of prompt, cached, output and reasoning, and how it ended (docs/operate/security.md). It
    may be moved away at any time. Empty: none."""

    cors_origins: Annotated[list[Origin], AfterValidator(cors.alone)] = []
    """Pages that may read answers in a browser, by their origins: "https://chat.example.com",
    "http://localhost:3000", or "*" alone for all pages. None: only pages that come from the gateway's own address.
    `/ui` and `/metrics` are for none of them. It is no access control: `keys_file` is."""
    ui: bool | None = None
    """Whether the page at /ui is served (docs/operate/ui.md). Nothing said: where `http` is a loopback address, to who
    asks for it by a loopback name. True: to whoever reaches the gateway, without any check. With `keys_file` it is
    served to admin keys wherever it is not false."""

    @property
    def serving_tls(self) -> ServerTls | None:
        return self.public_tls
