"""The JDK's HTTP client, on which many libraries stand: `java/Client.java` has the requests, java runs them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from testing.patience import PATIENCE_S
from tests.clients.conftest import KEY
from tests.gateway.conftest import MODEL, World

CLIENT = Path(__file__).parent / "java" / "Client.java"
JAVA, JAVAC = shutil.which("java"), shutil.which("javac")
pytestmark = pytest.mark.skipif(not (JAVA and JAVAC), reason="no JDK here")


async def test_jdk_http_client_gets_the_answers_it_expects(parrot: World) -> None:
    assert JAVA is not None
    java = await asyncio.create_subprocess_exec(
        *(JAVA, str(CLIENT), parrot.url, KEY, MODEL), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(PATIENCE_S):
        out, _ = await java.communicate()
    assert (java.returncode, out.decode().strip()) == (0, "all as expected")
