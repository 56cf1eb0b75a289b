"""Whose fault it is that a checkpoint cannot be used."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, HostFault
from gpu_scheduler.engines.sglang.base.faults import check_folder, fault
from protos import common_pb2, engine_pb2
from testing.engines.harness import load, node
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT
from tests.gpu_scheduler.engines.sglang.conftest import NEW_TOKENS
from tests.gpu_scheduler.engines.sglang.shared import Engines

PATH = "/srv/models/m"


def raised(*errors: BaseException) -> BaseException:
    """The last of these, raised while the one before it was handled, and so on."""
    first, *others = errors
    try:
        raise first
    except BaseException as error:
        caught = error
    for other in others:
        try:
            try:
                raise caught
            except BaseException:
                raise other  # noqa: B904
        except BaseException as error:
            caught = error
    return caught


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.EIO, "Input/output error", f"{PATH}/a.safetensors"), "a.safetensors: Input/output error"),
        (PermissionError(errno.EACCES, "Permission denied", f"{PATH}/config.json"), "config.json: Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError(errno.ENOSPC, "No space left on device", "/root/.cache/k"), "k: No space left on device"),
        (
            raised(FileNotFoundError(2, "No such file or directory", f"{PATH}/a"), ValueError("odd"), OSError("odder")),
            "a: No such file or directory",
        ),
        (OSError("Cannot allocate memory (os error 12)"), "OSError: Cannot allocate memory (os error 12)"),
        (MemoryError(), "MemoryError"),
        (RuntimeError("can't allocate memory"), "RuntimeError: can't allocate memory"),
    ],
)
def test_host_error_may_pass_and_is_not_the_models_fault(error: BaseException, told: str) -> None:
    found = fault(error, PATH)
    assert isinstance(found, HostFault) and found.may_pass and not found.model_at_fault and str(found) == told


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such rope"),
        raised(json.JSONDecodeError("Expecting value", "", 0), OSError(f"'{PATH}/config.json' is not valid JSON")),
        raised(KeyError("rope"), RuntimeError("could not read")),
        AssertionError(),
        NotImplementedError("no kernel"),
    ],
)
def test_error_that_is_not_the_hosts_is_the_models_fault(error: BaseException) -> None:
    found = fault(error, PATH)
    assert isinstance(found, BrokenModel) and found.model_at_fault and not found.may_pass
    assert PATH not in str(found)


def test_model_folder_that_cannot_be_read_is_a_host_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HostFault, match="^its folder does not exist$"):
        check_folder(str(tmp_path / "gone"))
    with pytest.raises(HostFault, match="^its folder has no config.json$"):
        check_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_folder(str(tmp_path))

    def fails(*_told: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("builtins.open", fails)
    with pytest.raises(HostFault, match="^config.json: Stale file handle$"):
        check_folder(str(tmp_path))
    monkeypatch.setattr("os.stat", fails)
    with pytest.raises(HostFault, match="^its folder: Stale file handle$"):
        check_folder(str(tmp_path))


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def _unmount(folder: Path) -> None:
    _move(folder)
    folder.mkdir()


AWAY: list[tuple[Callable[[Path], None], str]] = [
    (_move, "its folder does not exist"),
    (_unmount, "its folder has no config.json"),
]


@pytest.mark.sglang
@pytest.mark.asyncio(loop_scope="session")
async def test_model_folder_that_is_away_fails_the_load_with_one_line_and_loads_once_it_is_back(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    volume = tmp_path / "volume"
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        for goes_away, why in AWAY:
            volume.mkdir()
            (folder := volume / "m").mkdir()
            for file in models["llama"].iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            goes_away(folder)
            failed = await end.fail(load=load(at, "llama", folder, context_tokens=CONTEXT))
            assert (failed.reason, failed.may_pass, failed.model_at_fault) == (why, True, False)
            assert await at.leased_bytes() == 0
            if folder.exists():
                folder.rmdir()
            folder.with_name("elsewhere").rename(folder)
            await end.hold(load(at, "llama", folder, context_tokens=CONTEXT))
            end.ask("back", prompts[0], NEW_TOKENS, ignore_eos=True)
            answer = await end.answer("back")
            assert (answer.finish, answer.tokens) == (common_pb2.LENGTH, said["llama"][0])
            end.answers.clear()
            await end.do(unload=engine_pb2.Unload())
            volume.rename(tmp_path / f"done {why}")
