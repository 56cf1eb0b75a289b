"""Hooks on SGLang's attention in plain torch, which engines on a CPU use; there are none where there is a GPU.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
TorchNativeAttnBackend                Layers with a window read their own pool   they read it at slots of the other
._run_sdpa_forward_extend,            at its slots; sinks are part of attention  pool; sinks are left out
._run_sdpa_forward_decode
TorchNativeAttnBackend                Models with sinks are served on a CPU      SGLang passes them to a function that
.forward_extend, .forward_decode                                                 does not take them
model_hook                            Models with windows are served on a CPU    SGLang refuses them there
.handle_model_specific_adjustments
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_scheduler.engines.sglang.base.environment import has_gpu
from gpu_scheduler.engines.sglang.hooks.hook import Hook


def keep_sinks(
    original: Callable[..., Any], backend: Any, *args: Any, sinks: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    """Computes attention of one layer, and leaves the layer's `sinks`, one for each head, at the backend, where
    `extend` and `decode` find them."""
    backend.sinks = sinks
    return original(backend, *args, **kwargs)


def extend(
    original: Callable[..., Any],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes attention of prompts. `rows`: rows of the requests in `req_to_token`."""
    req_to_token, rows = _slots(backend, req_to_token, rows, seq_lens, kwargs)
    more = (seq_lens, prefix_lens, extend_lens, *args)
    original(backend, query, output, k_cache, v_cache, req_to_token, rows, *more, **kwargs)
    return _with_sinks(backend, query, output, k_cache, req_to_token[rows], seq_lens, extend_lens, kwargs)


def decode(
    original: Callable[..., Any],
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes attention of one new token of each request. `rows`: rows of the requests in `req_to_token`."""
    req_to_token, rows = _slots(backend, req_to_token, rows, seq_lens, kwargs)
    original(backend, query, output, k_cache, v_cache, req_to_token, rows, seq_lens, *args, **kwargs)
    one = torch.ones_like(seq_lens)
    return _with_sinks(backend, query, output, k_cache, req_to_token[rows], seq_lens, one, kwargs)


def _slots(
    backend: Any, req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(table of slots, rows of the requests in it) for one layer. If the layer has a window and a pool for it, the
    table has slots of that pool. A token that has left the window has no slot there; the slot of the request's last
    token stands for it, and the window's mask leaves it out at that place."""
    if not backend.use_sliding_window_kv_pool or options.get("sliding_window_size") is None or not len(seq_lens):
        return req_to_token, rows
    slots = backend.token_to_kv_pool.translate_loc_from_full_to_swa(req_to_token[rows, : int(seq_lens.max())].long())
    last = slots.gather(1, (seq_lens.long() - 1).clamp(min=0)[:, None])
    return torch.where(slots > 0, slots, last), torch.arange(len(rows))


def _with_sinks(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    new_lens: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Scales `output`, (tokens, heads, dim), as if each head attended to one more token, with the score of its sink and
    a value of 0. `query` has the last `new_lens` tokens of each request."""
    sinks, window = getattr(backend, "sinks", None), options.get("sliding_window_size")
    if sinks is None:
        return output
    first = 0
    for row, length, new in zip(slots, seq_lens.tolist(), new_lens.tolist(), strict=True):
        some = query[first : first + new].float()
        keys = k_cache[row[:length]].float()
        keys = keys.repeat_interleave(some.shape[1] // keys.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", some, keys) * options["scaling"]
        behind = torch.arange(length - new, length)[:, None] - torch.arange(length)
        seen = behind >= 0 if window is None else (behind >= 0) & (behind <= window)
        total = scores.masked_fill(~seen, -torch.inf).logsumexp(dim=2)
        output[first : first + new] *= torch.sigmoid(total - sinks.float()[:, None]).T[:, :, None].to(output.dtype)
        first += new
    return output


def accept_torch(original: Callable[..., Any], server_args: Any) -> Any:
    """Has SGLang check the settings of a model. For models with windows SGLang accepts some backends of attention, and
    plain torch is not among them. With `extend` and `decode` plain torch computes windows rightly, so during this check
    it counts as Triton."""
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of

    def counted(settings: Any) -> tuple[str, ...]:
        return tuple("triton" if backend == "torch_native" else backend for backend in backends_of(settings))

    model_hook.attention_backends_of = counted
    try:
        return original(server_args)
    finally:
        model_hook.attention_backends_of = backends_of


HOOKS: list[Hook] = []
_TORCH = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
if not has_gpu():
    HOOKS += [
        Hook(f"{_TORCH}._run_sdpa_forward_extend", extend, "AROUND"),
        Hook(f"{_TORCH}._run_sdpa_forward_decode", decode, "AROUND"),
        Hook(f"{_TORCH}.forward_extend", keep_sinks, "AROUND"),
        Hook(f"{_TORCH}.forward_decode", keep_sinks, "AROUND"),
        Hook("sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments", accept_torch, "AROUND"),
    ]
