"""SGLang's plugin entry point (`sglang.srt.plugins`): the hooks that make its scheduler an engine of ours.

SGLang calls `register` in every process that it starts or that asks it to load plugins; anywhere but in an engine
process of ours it does nothing. A hook that does not apply is only logged by SGLang, so `verify` checks each one
before the engine says that it is warm.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gpu_scheduler.engines.sglang.base.environment import ENGINE_VARIABLE
from gpu_scheduler.engines.sglang.hooks.hook import Hook

MADE_FOR = "0.5.23"
"""Version of SGLang whose internals the hooks know."""


def all_overriding() -> list[type]:
    """Classes below SGLang's whose methods, where they are marked `override`, replace SGLang's."""
    from gpu_scheduler.engines.sglang.hooks.scheduler import EngineScheduler, SocketlessScheduler, StepStreamer
    from gpu_scheduler.engines.sglang.kv.pools.allocator import ElasticAllocator
    from gpu_scheduler.engines.sglang.kv.pools.latent_pool import ElasticLatentPool
    from gpu_scheduler.engines.sglang.kv.pools.paged_allocator import ElasticPagedAllocator
    from gpu_scheduler.engines.sglang.kv.pools.pool import ElasticPool
    from gpu_scheduler.engines.sglang.kv.pools.states import ElasticStateAllocator, ElasticStatePool
    from gpu_scheduler.engines.sglang.kv.pools.window_allocator import ElasticWindowAllocator
    from gpu_scheduler.engines.sglang.kv.prefix_tree import StampedCore

    return [
        SocketlessScheduler,
        EngineScheduler,
        StepStreamer,
        ElasticAllocator,
        ElasticPagedAllocator,
        ElasticWindowAllocator,
        ElasticPool,
        ElasticLatentPool,
        StampedCore,
        ElasticStateAllocator,
        ElasticStatePool,
    ]


def all_hooks() -> list[Hook]:
    """All hooks, in the order in which SGLang's registry gets them."""
    # Hooks import SGLang, which only an engine process may; SGLang imports this file in every process of its own.
    from gpu_scheduler.engines.sglang.hooks import (
        attention,
        cpu_kernels,
        grammar,
        graphs,
        logprobs,
        loop,
        lora,
        memory,
        process,
        sampling,
    )

    modules = (process, loop, sampling, logprobs, grammar, memory, attention, graphs, lora, cpu_kernels)
    return [hook for module in modules for hook in module.HOOKS]


def register() -> None:
    """Registers all hooks with SGLang, which calls this; does nothing outside an engine process."""
    if os.environ.get(ENGINE_VARIABLE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from gpu_scheduler.engines.sglang.kv import prefix_tree

    prefix_tree.register()
    for hook in all_hooks():
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def load() -> None:
    """Loads SGLang's plugins in this process, ours among them. Raises SystemExit with one line if ours did not take, or
    if SGLang is not of the version `MADE_FOR`."""
    import sglang
    from sglang.srt.plugins import load_plugins

    if sglang.__version__ != MADE_FOR:
        raise SystemExit(f"this engine is made for SGLang {MADE_FOR}, found {sglang.__version__}")
    with _rebound_together():
        load_plugins()
    verify(all_hooks())
    verify_overriding(all_overriding())


@contextmanager
def _rebound_together() -> Iterator[None]:
    """Rebinds the names that other modules have imported of hooked functions when the block ends, in one walk over all
    modules. SGLang walks over them for every hook, which takes a third of an engine's start."""
    from sglang.srt.plugins import hook_registry

    hooked: dict[int, tuple[object, object, object]] = {}

    def remember(original: object, wrapped: object, source: object) -> int:
        hooked[id(original)] = original, wrapped, source
        return 0

    one_by_one = hook_registry._propagate_patch
    hook_registry._propagate_patch = remember
    try:
        yield
    finally:
        hook_registry._propagate_patch = one_by_one
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if (found := hooked.get(id(value))) is not None and module is not found[2]:
                setattr(module, name, found[1])


def verify(hooks: list[Hook]) -> None:
    """Raises SystemExit that names the first of `hooks` that is not in place."""
    for hook in hooks:
        try:
            found = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError):
            raise SystemExit(f"SGLang has no {hook.target}, which the plugin hooks") from None
        if not _wraps(found, hook.function):
            raise SystemExit(
                f"the plugin's hook on {hook.target} did not take: is the prism-serve distribution installed, and not "
                "excluded by SGLANG_PLUGINS?"
            )


def overridden(ours: type) -> dict[str, str]:
    """Names of the methods that a class of ours overrides, itself or in a base of ours, each with the full name of
    SGLang's method; empty where SGLang has none of that name."""
    theirs = [base for base in ours.__mro__ if base.__module__.startswith("sglang.")]
    marked = {
        name
        for base in ours.__mro__
        if base not in theirs
        for name, method in vars(base).items()
        if getattr(method, "__override__", False)
    }
    has = {name: next((base for base in theirs if name in vars(base)), None) for name in marked}
    return {name: "" if base is None else f"{base.__module__}.{base.__qualname__}.{name}" for name, base in has.items()}


def verify_overriding(classes: list[type]) -> None:
    """Raises SystemExit that names a method of `classes` that overrides none of SGLang's any more."""
    for each in classes:
        for name, target in overridden(each).items():
            if not target:
                raise SystemExit(f"SGLang has no {name} any more, which {each.__name__} overrides")


def _wraps(found: Any, function: Callable[..., Any]) -> bool:
    """Whether `function` is in the chain of wrappers that SGLang's registry built around the original."""
    while found is not None:
        cells = getattr(getattr(found, "__func__", found), "__closure__", None) or ()
        if any(cell.cell_contents is function for cell in cells):
            return True
        found = getattr(found, "__wrapped__", None)
    return False
