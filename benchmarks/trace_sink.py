"""A collector that reads what it is sent and throws it away, as cheaply as it can.

python benchmarks/trace_sink.py 4318
"""

from __future__ import annotations

import asyncio
import re
import sys

import uvloop

_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    except asyncio.IncompleteReadError:
        writer.close()


async def main(port: int) -> None:
    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
