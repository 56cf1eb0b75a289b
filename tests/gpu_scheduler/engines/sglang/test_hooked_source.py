"""The tool that shows how what we hook has changed from one SGLang to the next."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from testing.engines.hooked_source import compare, source_of

OLD = {
    "sglang/srt/steps.py": """
from sglang.srt.parts import moved_later, away

class Loop:
    def same(self): return 1
    def changed(self): return 1
    def gone(self): return 1
try:
    import kernels
except ImportError:
    def branched(): return 1
""",
    "sglang/srt/parts/__init__.py": "def moved_later(): return 1\ndef away(): return 1\n",
}
NEW = {
    "sglang/srt/steps.py": """
from sglang.srt.parts.inner import moved_later as moved_later

class Loop:
    def same(self): return 1
    def changed(self): return 2
    def new(self): return 1
try:
    import kernels
except ImportError:
    def branched(): return 2
""",
    "sglang/srt/parts/inner.py": "def moved_later(): return 1\n",
}


def folder(at: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)
    return at


def wheel(at: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(at, "w") as packed:
        for name, text in files.items():
            packed.writestr(name, text)
    return at


@pytest.mark.parametrize("packed", [folder, wheel])
def test_what_changed_is_shown_and_what_is_gone_is_said(tmp_path: Path, packed) -> None:
    old, new = (source_of(packed(tmp_path / name, files)) for name, files in (("old", OLD), ("new", NEW)))

    def said(name: str) -> list[str]:
        return list(compare([f"sglang.srt.steps.{name}"], old, new))

    assert said("Loop.same") == [], "nor is a function that only moved"
    assert said("moved_later") == []
    changed = said("Loop.changed")
    assert changed[0] == "== sglang.srt.steps.Loop.changed"
    assert [line for line in changed if "return" in line] == [
        "-def changed(self): return 1",
        "+def changed(self): return 2",
    ]
    assert len(said("branched")) > 1
    assert said("Loop.new")[0] == "== sglang.srt.steps.Loop.new: NEW"
    assert said("Loop.gone") == ["== sglang.srt.steps.Loop.gone: GONE"]
    assert said("away") == ["== sglang.srt.steps.away: GONE"]
    assert said("Loop.never") == ["== sglang.srt.steps.Loop.never: in neither"]
