"""Configuration of a gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gateway.access import cors
from services.runtime.config import Config, ServerTls
from services.wording.addresses import Address, HttpAddress

Origin = Annotated[str, AfterValidator(cors.origin), "origin"]


class GatewayConfig(Config):
    """`listen` is the gRPC address of the inference API, `metrics` a second place for what /metrics serves anyway."""

    http: HttpAddress
    """Address of the HTTP API, "host:port"; port 0: any that is free. Where a service manager hands a listening socket
    over (LISTEN_FDS), that one is served instead."""
    placement: Address
    """gRPC address of placement."""
    withdraw_s: float = Field(0.0, ge=0)
    """Of `drain_s`, how long a stop serves on as usual while /health and gRPC's health say no: longer than who balances
    load over gateways takes to notice. 0 where nobody does, or the manager waits before it stops anybody."""
    most_in_flight: int = Field(1024, ge=1)
    """Answers being made or waited for at once (a request with n = 4 is four); more get 429."""
    park_time_out_s: float = Field(60.0, gt=0)
    """How long a request waits for a model to come up before it gets 503, and a stream for another place when its own
    failed. Longer than a start from disk takes."""
    compile_time_out_s: float = Field(600.0, gt=0)
    """How long a request waits instead of `park_time_out_s`, where this is longer, while kernels are compiled for its
    model or the first engine of its group starts. Both are done once for a machine: nvcc takes a minute or two for one
    model, and an engine that reads its libraries from a cold disk as long."""
    reach_time_out_s: float = Field(15.0, gt=0)
    """Within `park_time_out_s`, how long a request waits while no group can be reached that has its model or could
    bring it up: longer than a gpu_scheduler takes to start again and placement to notice a node that is cut off."""
    request_time_out_s: float = Field(600.0, ge=0)
    """From arrival to the last token; 0: no bound."""
    replay_limit: int = Field(4, ge=0)
    """How many times in a row a request is taken up elsewhere after failing without a token. A request that kills what
    it runs on must not go around the whole cluster; one that was only near a fault gets its tokens in between."""
    routes_time_out_s: float = Field(10.0, gt=0)
    """How long a start waits for placement's routes before it serves without them."""
    activate_time_out_s: float = Field(10.0, gt=0)
    """For one call to placement, which answers as soon as it has chosen."""
    tokenizer_threads: int = Field(2, ge=1)
    """For prompts longer than `inline_characters`, for loading tokenizers, and all but one for /tokenize and
    /detokenize."""
    tokenizers_kept: int = Field(64, ge=1)
    """How many models' tokenizers stay in memory; a large one takes about 100 MiB."""
    inline_characters: int = Field(4096, ge=0)
    """A prompt up to this length is tokenized in the loop: about a millisecond, and less than handing it to a
    thread and back costs under load."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """What holds for `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` where a request does not give
    them: the model's generation_config.json, or a temperature of 1 and no limits."""
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
    """Of one body, as it is when it is unpacked; a longer one gets 413."""
    most_bodies_bytes: int = Field(256 << 20, ge=1024)
    """Of bodies that have not come to their end, together, without the first 64 KiB of each; more get 503."""
    traces: bool = False
    """Spans of requests, by OTLP over HTTP; OTEL_EXPORTER_OTLP_ENDPOINT and other variables of OpenTelemetry's say
    where to, and of how many (docs/operate/monitoring.md)."""

    public_tls: ServerTls | None = None
    """For clients, at `http` and `listen`, where that is TCP; none: in the clear. (`tls` is for the way to placement
    and groups.)"""
    keys_file: str = ""
    """API keys (docs/operate/security.md); empty: whoever reaches the gateway may ask for anything."""

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
