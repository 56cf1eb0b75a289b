from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from gateway.parsing.parsers import Parsers


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def parsers() -> AsyncIterator[Parsers]:
    """SGLang's parsers, in their process."""
    made = Parsers()
    yield made
    await made.close()
