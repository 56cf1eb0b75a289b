"""The plugin: what it hooks is checked before an engine says that it is warm."""

from __future__ import annotations

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typing_extensions import override

from gpu_scheduler.engines.sglang import plugin
from gpu_scheduler.engines.sglang.hooks.hook import Hook
from testing.engines.harness import START_S
from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    """An engine that has no parent's socket to speak on: it must end before it needs one."""
    import os

    ours, theirs = socket.socketpair()
    with ours, theirs:
        return subprocess.run(
            [sys.executable, "-m", "gpu_scheduler.engines.sglang", "--channel-fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=START_S,
        )


def test_an_engine_whose_hooks_did_not_take_refuses_to_start_in_one_line() -> None:
    ended = start(SGLANG_PLUGINS="another")
    assert ended.returncode == 1
    said = [line for line in ended.stderr.splitlines() if "hook on" in line]
    assert len(said) == 1 and "sglang.srt.distributed.bootstrap.init_parallel_runtime did not take" in said[0]


def test_a_hook_counts_only_when_it_is_in_the_chain_around_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    def original() -> None: ...

    def ours() -> None: ...

    def wrapper() -> None:
        ours()

    wrapper.__wrapped__ = original  # type: ignore[attr-defined]

    def outer() -> None:
        original()

    outer.__wrapped__ = wrapper  # type: ignore[attr-defined]
    place = SimpleNamespace(hooked=outer, plain=original)
    monkeypatch.setattr("pkgutil.resolve_name", lambda name: getattr(place, name))
    plugin.verify([Hook("hooked", ours, "AROUND")])
    with pytest.raises(SystemExit, match="hook on plain did not take"):
        plugin.verify([Hook("plain", ours, "AROUND")])
    with pytest.raises(SystemExit, match="SGLang has no gone"):
        plugin.verify([Hook("gone", ours, "AROUND")])


def test_a_method_that_overrides_none_of_sglangs_any_more_refuses_the_start() -> None:
    class Theirs:
        def kept(self) -> None: ...

    Theirs.__module__ = "sglang.srt.somewhere"

    class Mixin:
        @override  # type: ignore[misc]
        def kept(self) -> None: ...

    class Ours(Mixin, Theirs):
        def own(self) -> None: ...

    class Late(Ours):
        @override  # type: ignore[misc]
        def own(self) -> None: ...

    assert plugin.overridden(Ours) == {"kept": f"sglang.srt.somewhere.{Theirs.__qualname__}.kept"}
    plugin.verify_overriding([Ours])
    with pytest.raises(SystemExit, match="SGLang has no own any more, which Late overrides"):
        plugin.verify_overriding([Ours, Late])


OVERRIDING = """
from gpu_scheduler.engines.sglang import plugin
for each in plugin.all_overriding():
    assert (found := plugin.overridden(each)) and all(found.values()), each
"""


def test_each_class_below_sglangs_overrides_something_of_it(imported: Imported) -> None:
    imported.run(OVERRIDING)


COUNTED = """
import re
from importlib import import_module
from pathlib import Path

from gpu_scheduler.engines.sglang import plugin

table = Path("docs/design/overview.md").read_text()
rows = re.findall(r"^[|] `([a-z_]+)[.]py` [|] (none|[0-9]+)(?::| [|]| [(]([0-9]+) on the CPU[)])", table, re.M)
both = {name: (int(gpu) if gpu != "none" else 0, int(cpu or gpu.replace("none", "0"))) for name, gpu, cpu in rows}
modules = {name: import_module("gpu_scheduler.engines.sglang.hooks." + name) for name in both}
here = {name: len(getattr(module, "HOOKS", ())) for name, module in modules.items()}
assert here == {name: cpu for name, (_, cpu) in both.items()}
assert sum(here.values()) == len(plugin.all_hooks())
on_gpus, on_the_cpu = map(sum, zip(*both.values()))
for page, said in {
    "docs/design/overview.md": f"{on_gpus} ({on_the_cpu} on the CPU)",
    "ARCHITECTURE.md": f"{on_gpus} hooks on its internals ({on_the_cpu} on the CPU)",
    "README.md": f"{on_gpus} hooks on its internals",
}.items():
    assert said in Path(page).read_text().replace("\\n", " "), (page, said)
upstream = Path("docs/design/upstream.md").read_text()
assert f"with {on_gpus} hooks on a GPU" in upstream
proposed = dict.fromkeys((name for name, (gpu, _) in both.items() if gpu), 0)
for count, name in re.findall(r"([0-9]+)\\s+of\\s+`([a-z_]+)[.]py`", upstream):
    proposed[name] += int(count)
assert proposed == {name: gpu for name, (gpu, _) in both.items() if gpu}, proposed
"""


def test_documents_count_the_hooks_as_there_are(imported: Imported) -> None:
    imported.run(COUNTED)


def test_plugin_outside_an_engine_process_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRISM_ENGINE", raising=False)
    monkeypatch.setattr(plugin, "all_hooks", lambda: pytest.fail("hooks were made"))
    plugin.register()


REBOUND = """
import sys
from types import ModuleType

from gpu_scheduler.engines.sglang import plugin
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

source, importer = ModuleType("source"), ModuleType("importer")
exec("def said(): return 'plain'", vars(source))
importer.also, importer.other = source.said, len
sys.modules.update(source=source, importer=importer)
HookRegistry.register("source.said", lambda original: "hooked " + original(), HookType.AROUND)
with plugin._rebound_together():
    HookRegistry.apply_hooks()
assert source.said() == importer.also() == "hooked plain"
assert importer.other is len
"""


def test_a_hooked_function_is_rebound_in_the_modules_that_imported_it(imported: Imported) -> None:
    imported.run(REBOUND)
