"""For all tests."""

from __future__ import annotations

import services.ipc.forking  # noqa: F401  (before grpc: tests start processes)

import gc  # isort: skip
import signal  # isort: skip
import subprocess  # isort: skip
from collections.abc import Iterator  # isort: skip
from pathlib import Path  # isort: skip
from typing import Any  # isort: skip

import pytest  # isort: skip
from hypothesis import HealthCheck, settings  # isort: skip

from testing import zygote  # isort: skip

# Libraries and tests stay: looking at them again and again is a quarter of what collecting tests takes.
gc.disable()

# Tests start a thousand processes; importing their libraries would be most of what they do.
zygote.install()

# No test fails for being slow: machines are.
settings.register_profile("prism", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prism")

# In a shell's background it is ignored, and so it would be by what tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """From now on there is garbage, for which libraries and thousands of tests need not be looked at."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def executed() -> Iterator[None]:
    """Processes that the module's tests start are new interpreters, as a user's are."""
    with zygote.executing():
        yield


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, which `make serve MODELS=smollm2` serves. It is made once and stays."""
    from deploy.local.smollm2 import folder

    folder.make()
    return folder.FOLDER


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Says how a test process ended that died in the middle of a test; which test it was, the summary says."""
    if error:
        try:
            status = node.gateway._io.popen.wait(10)
        except subprocess.TimeoutExpired:
            status = "none: it lives, and does not speak"
        print(f"{node.gateway.id} died; exit status {status} (-N: by signal N)", flush=True)
