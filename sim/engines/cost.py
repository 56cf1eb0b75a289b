"""The cost of work: seconds of prefill and decode steps, of wake-ups and of memory on its way.

A decode step reads all weights, once, and the KV of every request of the batch, and computes with each weight for each
request, which takes two thirds of the time that it takes for a token of a prompt. A layer takes some time whatever its
size, and weights are read in that time too: `weight_bytes_per_s` is for the weights beyond those, and so is above the
memory's rate. On the devices,

    decode  = layers * step_layer_s + weights / weight_bytes_per_s + batch * weights * request_s_per_byte
              + KV / kv_bytes_per_s

and the host needs `decode_host_s + layers * decode_host_layer_s + batch * decode_host_request_s` at least: it gives the
devices the step, decides for each request what comes next, and passes on the results of the previous step. Only small
models' devices are faster than the host; other engines may use the time in which they are idle meanwhile
(`processor.py`).

A prefill step needs its devices for

    prefill_step_s + tokens * (weights * prefill_s_per_token_byte + layers * prefill_s_per_token_layer)
                   + tokens * KV of their contexts * attention_s

and its host for

    prefill_host_s + layers * (prefill_graph_layer_s up to prefill_graph_tokens, else prefill_layer_s)

because the host chooses prompts and their places, gives the device all kernels, whose number grows with the layers and
is smaller where a graph has most of them, and looks at the results. Host and devices work at the same time, and the
host may begin a step while the devices are at the previous one, once it is through with that itself. Each engine has a
host of its own.

A mixture of experts computes with `active_bytes` of its weights for each token, and a decode step reads what its
requests need together: those bytes for one, nearly all weights for many,

    read = weights - (weights - active) * (1 - expert_share) ** (batch - 1)

as if each request chose its experts by itself. Experts are not fitted to measurements yet. Embeddings of every layer
are never read as a whole.

Bytes are those of one device of the model; with several devices every step exchanges too (`exchange_s`). Engines that
share a device get equal slices of it, and together `sharing` of what one alone would get, or `decode_sharing` while
all of them decode (`processor.py`).

The numbers of `GpuModel` are an H200's, put there by hand from what `python -m sim.fit` prints; `H100` has the numbers
that differ for an H100.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_scheduler.engines.sharing.prefill_graphs import LEAST_TOKENS, graph_tokens
from kv_kinds.layout import KvKind, KvLayout, of_tokens

GB = 1e9
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of GPU with its host; fields end in their units. `fit.py` says which numbers are fitted, and to what."""

    capacity_bytes: int = 149_500_000_000
    """Bytes of one device for models: an H200's 150.8 GB less balloond's reserve and spares."""
    step_layer_s: float = 5.53e-5
    weight_bytes_per_s: float = 5.406e12
    request_s_per_byte: float = 1.036e-15
    kv_bytes_per_s: float = 4.377e12
    decode_host_s: float = 0.002024
    decode_host_request_s: float = 1.661e-5
    decode_host_layer_s: float = 0.0
    """Host's time for each layer of a decode step: above 0 for engines without CUDA graphs, whose hosts start every
    kernel."""
    prefill_host_s: float = 0.003408
    """Host's time of a prefill step; like the next two it does not depend on the number of devices."""
    prefill_after_s: float = 0.006378
    """Host's time after a step without graphs, until the next prefill step; a first token does not wait for it."""
    prefill_layer_s: float = 0.0004925
    prefill_graph_tokens: int = 0
    """Largest step in tokens that is replayed from CUDA graphs; 0: by the weights, as in engines
    (`gpu_scheduler/engines/sharing/prefill_graphs.py`)."""
    prefill_graph_layer_s: float = 0.0001975
    """Host's time for each layer of a step with graphs."""
    prefill_gap_layer_s: float = 0.001704
    """Time for each layer of a step with which its host is slower than the devices: neighbours have the devices for so
    long meanwhile, if they always want them."""
    prefill_step_s: float = 0.0
    prefill_s_per_token_byte: float = 1.184e-15
    prefill_s_per_token_layer: float = 1.583e-07
    """Time between the products with weights: two fifths of a 1B model's step, a sixth of an 8B model's."""
    attention_s: float = 1.0e-16
    """Seconds for each token and each byte of KV that it attends to."""
    exchange_s: float = 0.0008
    """Time that a step of a model on several devices takes to exchange. From one model on two devices: little more than
    a guess."""
    sharing: float = 0.9024
    """Share of one engine's work that several engines do together. Above 1 engines would use the devices while others'
    hosts are between two steps; below 1 they lose by taking turns."""
    decode_sharing: float = 0.9366
    """Share of one engine's work that several engines do together while none of them prefills."""
    path_s: float = 0.01001
    """Time from a request's arrival at its gateway to its engine's queue, and of its first token back."""
    handover_s: float = 0.0008
    """Time for which a request keeps each process on its way busy: requests of one moment reach their engines so far
    apart. Bursts of eight and twenty-four on H200s' hosts (docs/lab/gpu-runs.md, "A burst waits for its gateway")."""
    capture_share: float = 1.0
    """Share of the devices that an engine which comes up cold wants while it captures its graphs. Whole prefill steps
    of an 8B model beside it took 70 to 130 ms instead of 50, as beside an engine that always wants them."""
    prefill_chunk: int = 2048
    """The most tokens of an engine's prefill step."""
    most_running: int = 256
    """The most requests that an engine decodes at a time."""

    link_bytes_per_s: float = 50.9 * GB
    """Rate of a GPU's own way to host memory, mapping and checking of what arrives included."""
    host_bytes_per_s: float = 122.5 * GB
    """Rate of host memory to all GPUs together; counted within a group only."""
    wake_base_s: float = 0.01545
    cold_base_s: float = 0.978
    cold_layer_s: float = 0.089
    """Time of a cold start for each layer: graphs are captured."""
    hibernate_s: float = 0.02
    """Median of 600 hibernations of running systems, by their logs; 0.009 on a host that has nothing else to do."""
    reclaim_base_s: float = 0.003
    reclaim_bytes_per_s: float = 155.0 * GB
    """Rate at which memory that others give back becomes available."""

    quota_bytes: int = 1_650_000_000
    """Bytes that an awake engine needs for itself."""
    kept_bytes: int = 663_000_000
    """Bytes that a hibernating engine keeps of its quota."""
    graph_bytes: int = 480 * MIB
    prefill_graph_bytes: int = 128 * MIB // 1536
    """Bytes of an engine's CUDA graphs; `prefill_graph_bytes` more for each token by which its largest prefill step
    with a graph exceeds the least. Engines of 8B took 480 MiB, also with several ranks; of 1B and 3B 608 MiB with 2,048
    tokens."""
    weights_extent_bytes: int = 384 * MIB
    """Bytes of the largest extents of weights; a model's last extent is as large as its rest, in
    `weights_unit_bytes`."""
    weights_unit_bytes: int = 32 * MIB
    kv_extent_bytes: int = 64 * MIB
    """Bytes of an extent of KV: only large extents, which give an eighth of the events."""


H200 = GpuModel()
H100 = replace(
    H200,
    capacity_bytes=84_200_000_000,
    weight_bytes_per_s=3.5e12,
    kv_bytes_per_s=H200.kv_bytes_per_s * 3.35 / 4.8,
)
"""An H200 with less memory, and slower: 85.5 GB less the same reserve; weights as fast as models of 8B and 3B decoded
alone (`benchmarks/results/compare_h100/slos.json`), KV in proportion to the memory's rate (3.35 to 4.8 TB/s, NVIDIA's
data sheets). Nothing else is fitted. `benchmarks/sim_check.py` compares it with runs of whole systems."""
GPUS = {"h200": H200, "h100": H100}


@dataclass(frozen=True, slots=True)
class Shape:
    """The facts about a model from which costs are computed. Bytes are of all devices together."""

    weights_bytes: int
    kv_bytes_per_token: int
    devices: int = 1
    layers: int = 32
    active_bytes: int = 0
    """Bytes of weights that one token goes through; 0: all of them."""
    expert_share: float = 0.0
    """Share of a layer's experts that a token goes through; 0: the share of the bytes; 1: there are no experts, and
    weights beyond `active_bytes` are embeddings, of which no batch reads more than rows."""
    other_kinds: tuple[KvKind, ...] = ()
    """Kinds of KV beside attention over all tokens, which `kv_bytes_per_token` is of."""

    @property
    def kv(self) -> KvLayout:
        """All kinds of KV of a model of this shape."""
        return KvLayout(of_tokens(self.kv_bytes_per_token).kinds + self.other_kinds)


def largest_graph(shape: Shape, hardware: GpuModel) -> int:
    """Tokens of the largest prefill step that is replayed from a graph; 0 for engines of several ranks, which have no
    graphs for prefill."""
    return (
        hardware.prefill_graph_tokens or graph_tokens(shape.active_bytes or shape.weights_bytes)
        if shape.devices == 1
        else 0
    )


def graph_bytes(shape: Shape, hardware: GpuModel) -> int:
    """Bytes of CUDA graphs on each device."""
    beyond = max(0, largest_graph(shape, hardware) - LEAST_TOKENS)
    return hardware.graph_bytes + beyond * hardware.prefill_graph_bytes


_HOST_TIMES = (
    "decode_host_s",
    "decode_host_request_s",
    "decode_host_layer_s",
    "prefill_host_s",
    "prefill_after_s",
    "prefill_layer_s",
    "prefill_graph_layer_s",
    "path_s",
    "handover_s",
)


def on_host(hardware: GpuModel, factor: float) -> GpuModel:
    """The GPU on a host whose cores take so many times as long."""
    return replace(hardware, **{name: factor * getattr(hardware, name) for name in _HOST_TIMES})


class Cost:
    """Costs of one model on one kind of GPU."""

    __slots__ = (
        "_decode_fixed",
        "_idle",
        "_idle_s",
        "_each",
        "_graph_tokens",
        "_host",
        "_host_decode",
        "_host_each",
        "_host_graph",
        "_kv",
        "_look",
        "_prefill_fixed",
        "_token",
        "chunk_tokens",
        "hardware",
        "shape",
    )

    def __init__(self, shape: Shape, hardware: GpuModel = H200) -> None:
        self.shape = shape
        self.hardware = hardware
        weights, kv = shape.weights_bytes / shape.devices, shape.kv_bytes_per_token / shape.devices
        exchange = hardware.exchange_s if shape.devices > 1 else 0.0
        active = (shape.active_bytes or shape.weights_bytes) / shape.devices
        self._decode_fixed = shape.layers * hardware.step_layer_s + exchange + weights / hardware.weight_bytes_per_s
        self._idle = 1 - (shape.expert_share or active / weights) if weights else 0.0
        if shape.expert_share == 1:
            self._idle = 1.0
        self._idle_s = (weights - active) / hardware.weight_bytes_per_s
        # A step reads a request's windows, as if they were full, and reads and writes its state.
        beside = sum(kind.window_tokens * kind.bytes_per_token + 2 * kind.bytes_per_state for kind in shape.other_kinds)
        self._each = active * hardware.request_s_per_byte + beside / shape.devices / hardware.kv_bytes_per_s
        self._kv = kv / hardware.kv_bytes_per_s
        self._host_decode = hardware.decode_host_s + shape.layers * hardware.decode_host_layer_s
        self._host_each = hardware.decode_host_request_s
        self._prefill_fixed = hardware.prefill_step_s + exchange
        host = hardware.prefill_host_s + exchange
        self._host = host + shape.layers * hardware.prefill_layer_s
        self._host_graph = host + shape.layers * hardware.prefill_graph_layer_s
        layers = shape.layers / shape.devices  # each layer's part is on one device
        self._token = active * hardware.prefill_s_per_token_byte + layers * hardware.prefill_s_per_token_layer
        self._look = kv * hardware.attention_s
        self.chunk_tokens = hardware.prefill_chunk
        self._graph_tokens = largest_graph(shape, hardware)

    def decode(self, steps: int, batch: int, context: int) -> float:
        """Seconds of so many decode steps, without neighbours, that begin with `context` tokens of KV in all."""
        return max(self.decode_devices(steps, batch, context), steps * self._decode_host(batch))

    def decode_share(self, batch: int, context: int) -> float:
        """Share of such a decode step's time in which the devices are busy."""
        devices, host = self.decode_devices(1, batch, context), self._decode_host(batch)
        return devices / host if host > devices else 1.0

    def steps_in(self, seconds: float, batch: int, context: int) -> int:
        """Number of such decode steps that have ended after `seconds`."""
        linear = self._decode_weights(batch) + batch * self._each + self._kv * (context - batch / 2)
        square = self._kv * batch / 2
        root = (linear * linear + 4 * square * seconds) ** 0.5
        steps = int(2 * seconds / (linear + root))
        if (host := self._decode_host(batch)) > 0:
            steps = min(steps, int(seconds / host))
        while self.decode(steps + 1, batch, context) <= seconds:
            steps += 1
        while steps > 0 and self.decode(steps, batch, context) > seconds:
            steps -= 1
        return steps

    def decode_devices(self, steps: int, batch: int, context: int) -> float:
        grown = steps * context + batch * (steps * (steps - 1) // 2)
        return steps * (self._decode_weights(batch) + batch * self._each) + self._kv * grown

    def _decode_weights(self, batch: int) -> float:
        """Seconds of a decode step for layers and weights, before what each request adds."""
        if not self._idle_s:
            return self._decode_fixed
        return self._decode_fixed - self._idle_s * self._idle ** max(0, batch - 1)

    def _decode_host(self, batch: int) -> float:
        return self._host_decode + batch * self._host_each

    def prefill_part(self, tokens: int, before: int) -> float:
        """Seconds on the devices that one prompt adds to a prefill step: `tokens` that follow `before` others."""
        return tokens * (self._token + self._look * (before + tokens / 2))

    def prefill_devices(self, parts: float) -> float:
        """Seconds that the devices need for a step whose parts take `parts` seconds together."""
        return self._prefill_fixed + parts

    def prefill_host(self, tokens: int) -> float:
        """Seconds that the host needs for a step of so many tokens."""
        return self._host_graph if tokens <= self._graph_tokens else self._host

    def prefill_gaps(self, parts: float, tokens: int) -> float:
        """Seconds by which a step with these parts takes longer beside decodes that leave the devices nothing and do
        not stand still. After each piece that the host gives to the devices the decodes have a slice; pieces that the
        host is ahead by need no slice of their own."""
        alone = max(0.0, 1 - self.prefill_devices(parts) / self.prefill_host(tokens))
        return alone * self.shape.layers * self.hardware.prefill_gap_layer_s

    def prefill_after(self, tokens: int) -> float:
        """Seconds of the host's time after a step of so many tokens, before it can begin another."""
        return 0.0 if tokens <= self._graph_tokens else self.hardware.prefill_after_s

    def prefill(self, parts: float, tokens: int) -> float:
        """Seconds of a prefill step without neighbours."""
        return max(self.prefill_host(tokens), self.prefill_devices(parts))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate of one whole chunk, as an engine measures it when it comes up."""
        tokens = self.chunk_tokens
        return tokens / self.prefill(self.prefill_part(tokens, 0), tokens)

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step with one request, as an engine measures it when it comes up."""
        return self.decode(1, 1, 1)

    @property
    def wake_s(self) -> float:
        """Seconds of waking from hibernation: all devices at once, each over its own link."""
        return self.hardware.wake_base_s + self._copy_s

    @property
    def cold_s(self) -> float:
        """Seconds of starting from an image, in a warm engine: graphs are captured again."""
        return self.hardware.cold_base_s + self.shape.layers * self.hardware.cold_layer_s + self._copy_s

    @property
    def capture_s(self) -> float:
        """Seconds of a cold start in which its engine uses the devices: graphs are captured."""
        return self.shape.layers * self.hardware.cold_layer_s

    @property
    def _copy_s(self) -> float:
        hardware, devices = self.hardware, self.shape.devices
        return self.shape.weights_bytes / min(devices * hardware.link_bytes_per_s, hardware.host_bytes_per_s)
