"""The processes of the extent benchmark: one that makes and hands out extents, and two that map them.

The protocol is the smallest that can show the costs. Over a SEQPACKET socket an engine asks for extents (GROW) and is
answered by one message with that many ids and descriptors, never more than a message may carry; it gives extents back
by id (GIVE), answered when the last descriptor is closed. An engine keeps at most a few requests unanswered, so that
the descriptors in flight are bounded by what the receivers asked for.

The maker closes its own handle once an extent is exported: the descriptor that it keeps is what holds the memory, as
the keeper's will. It needs no CUDA context.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.gpu import vmm

MAX_DESCRIPTORS = 253  # the kernel's SCM_MAX_FD: descriptors in one message
GROW, GIVE = 1, 2
_HEADER = struct.Struct("<BxxxIQ")  # kind, how many, bytes of each
_NOW = time.perf_counter_ns


def raise_descriptor_limit(wanted: int = 1 << 18) -> int:
    """As many descriptors as we may have: 139 GiB in extents of 2 MiB are 71,000. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
    except (ValueError, PermissionError):  # only CAP_SYS_RESOURCE raises the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Calls:
    """Time of each kind of call, added up per message: microseconds and how many calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the maker's control thread takes what a serving thread adds to
        self._sums: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._open: dict[str, list[int]] = {}

    def add(self, name: str, begun: int, ended: int) -> None:
        entry = self._open.setdefault(name, [0, 0])
        entry[0] += ended - begun
        entry[1] += 1

    def end_message(self) -> None:
        with self._lock:
            closed, self._open = self._open, {}
            for name, (ns, count) in closed.items():
                self._sums[name].append((round(ns / 1e3, 2), count))

    def take(self) -> dict[str, list[tuple[float, int]]]:
        self.end_message()
        with self._lock:
            sums, self._sums = dict(self._sums), defaultdict(list)
            return sums


class Maker:
    """Makes extents and hands them out: what balloond and its keeper do between them."""

    def __init__(self, device: int) -> None:
        self._extents = vmm.Extents(device)
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._spares: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._next_id = 0
        self.calls: dict[int, Calls] = {}

    def held(self) -> int:
        return len(self._held)

    def _make(self, nbytes: int, calls: Calls) -> tuple[int, int]:
        t0 = _NOW()
        handle = self._extents.create(nbytes)
        t1 = _NOW()
        descriptor = self._extents.export(handle)
        t2 = _NOW()
        self._extents.release(handle)
        t3 = _NOW()
        calls.add("create", t0, t1)
        calls.add("export", t1, t2)
        calls.add("release_own", t2, t3)
        with self._lock:
            self._next_id += 1
            self._held[self._next_id] = descriptor
            return self._next_id, descriptor

    def prepare(self, count: int, nbytes: int) -> None:
        """Make spares ahead of need."""
        calls = Calls()
        made = [self._make(nbytes, calls) for _ in range(count)]
        with self._lock:
            self._spares[nbytes].extend(made)

    def hold(self, count: int, nbytes: int) -> None:
        """Hold extents that nobody asks for, so that the driver's own pools do not run empty."""
        self.prepare(count, nbytes)
        with self._lock:
            self._spares[-1] += self._spares.pop(nbytes)

    def close_own(self) -> None:
        """Close every descriptor here, so that only those that others were sent hold the memory."""
        with self._lock:
            for extent_id, descriptor in self._held.items():
                os.close(descriptor)
                self._held[extent_id] = -1

    def drop_spares(self) -> None:
        with self._lock:
            spares = [extent for extents in self._spares.values() for extent in extents]
            self._spares.clear()
            for extent_id, _ in spares:
                os.close(self._held.pop(extent_id))

    def serve(self, peer: int, connection: socket.socket) -> None:
        """Answer one engine until it hangs up. A failure hangs up on the engine, so that nobody waits for ever."""
        with connection:
            self._serve(peer, connection)

    def _serve(self, peer: int, connection: socket.socket) -> None:
        calls = self.calls[peer] = Calls()
        while message := connection.recv(1 << 16):
            kind, count, nbytes = _HEADER.unpack_from(message)
            if kind == GROW:
                granted = []
                for _ in range(count):
                    with self._lock:
                        spare = self._spares[nbytes].pop() if self._spares[nbytes] else None
                    granted.append(spare or self._make(nbytes, calls))
                t0 = _NOW()
                ids = struct.pack(f"<{count}I", *(extent_id for extent_id, _ in granted))
                socket.send_fds(connection, [ids], [descriptor for _, descriptor in granted])
                calls.add("send", t0, _NOW())
                calls.end_message()
            else:
                ids_given = struct.unpack_from(f"<{count}I", message, _HEADER.size)
                for extent_id in ids_given:
                    with self._lock:
                        descriptor = self._held.pop(extent_id)
                    if descriptor < 0:
                        continue
                    t0 = _NOW()
                    os.close(descriptor)
                    calls.add("close_last", t0, _NOW())
                calls.end_message()
                connection.send(b"k")


def run_maker(device: int, control: Connection, connections: list[socket.socket]) -> None:
    """Body of the maker's process: a thread for each engine; the control pipe asks for spares and timings."""
    limit = raise_descriptor_limit()
    maker = Maker(device)
    threads = [threading.Thread(target=maker.serve, args=(i, c), daemon=True) for i, c in enumerate(connections)]
    for thread in threads:
        thread.start()
    control.send("ready")
    while (command := control.recv()) is not None:
        name, *arguments = command
        if name == "prepare":
            maker.prepare(*arguments)
            control.send("done")
        elif name == "close_own":
            maker.close_own()
            control.send("done")
        elif name == "hold":
            maker.hold(*arguments)
            control.send("done")
        elif name == "drop":
            maker.drop_spares()
            control.send("done")
        elif name == "calls":
            control.send({peer: calls.take() for peer, calls in maker.calls.items()})
        elif name == "held":
            control.send(maker.held())
        elif name == "limit":
            control.send(limit)


class Engine:
    """Asks for extents, maps them into its range, unmaps them and gives them back."""

    def __init__(self, device: int, connection: socket.socket, span: int = 160 << 30) -> None:
        vmm.make_current(device)
        self._extents = vmm.Extents(device)
        self._socket = connection
        self._base = vmm.reserve(span)
        self._mapped: list[tuple[int, int, int, Any]] = []  # id, address, bytes, handle
        self._top = self._base
        self._device = device
        self._kept = (0, -1)

    def _ask(self, count: int, nbytes: int) -> None:
        self._socket.send(_HEADER.pack(GROW, count, nbytes))

    def _receive(self, nbytes: int, calls: Calls) -> int:
        """Take one answer and map all of it; returns how many extents."""
        t0 = _NOW()
        message, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, MAX_DESCRIPTORS)
        if not message:
            raise ConnectionError("the maker hung up")
        t1 = _NOW()
        calls.add("receive_and_wait", t0, t1)
        first = self._top
        for extent_id, descriptor in zip(struct.unpack(f"<{len(message) // 4}I", message), descriptors, strict=True):
            t0 = _NOW()
            handle = self._extents.import_descriptor(descriptor)
            t1 = _NOW()
            os.close(descriptor)
            t2 = _NOW()
            self._extents.map(self._top, nbytes, handle)
            t3 = _NOW()
            calls.add("import", t0, t1)
            calls.add("close", t1, t2)
            calls.add("map", t2, t3)
            self._mapped.append((extent_id, self._top, nbytes, handle))
            self._top += nbytes
        t0 = _NOW()
        self._extents.allow(first, self._top - first)
        calls.add("allow", t0, _NOW())
        calls.end_message()
        return len(descriptors)

    def grow(self, count: int, nbytes: int, batch: int, ahead: int = 2) -> dict[str, Any]:
        """Map `count` extents, asked for `batch` at a time with `ahead` requests unanswered."""
        calls, asked, got = Calls(), 0, 0
        begun = time.perf_counter()
        while got < count:
            while asked < count and asked - got <= (ahead - 1) * batch:
                more = min(batch, count - asked)
                self._ask(more, nbytes)
                asked += more
            got += self._receive(nbytes, calls)
        return {"seconds": time.perf_counter() - begun, "extents": count, "calls": calls.take()}

    def give_back(self, count: int, batch: int) -> dict[str, Any]:
        """Unmap, release and give back the `count` extents mapped last; ends when the maker closed its descriptors."""
        calls, messages, acknowledged = Calls(), 0, 0
        begun = time.perf_counter()
        for start in range(0, count, batch):
            ids = []
            for _ in range(min(batch, count - start)):
                extent_id, address, nbytes, handle = self._mapped.pop()
                t0 = _NOW()
                self._extents.unmap(address, nbytes)
                t1 = _NOW()
                self._extents.release(handle)
                t2 = _NOW()
                calls.add("unmap", t0, t1)
                calls.add("release", t1, t2)
                self._top = address
                ids.append(extent_id)
            self._socket.send(_HEADER.pack(GIVE, len(ids), 0) + struct.pack(f"<{len(ids)}I", *ids))
            messages += 1
            calls.end_message()
            if messages - acknowledged > 2:
                self._socket.recv(1)
                acknowledged += 1
        unmapped = time.perf_counter() - begun
        while acknowledged < messages:
            self._socket.recv(1)
            acknowledged += 1
        return {
            "seconds": time.perf_counter() - begun,
            "seconds_until_unmapped": unmapped,
            "extents": count,
            "calls": calls.take(),
        }

    def latency(self, iterations: int, nbytes: int) -> dict[str, Any]:
        """One extent at a time: microseconds from asking until mapped, and from unmapping until acknowledged."""
        mapped, returned, calls = [], [], Calls()
        for _ in range(iterations):
            t0 = _NOW()
            self._ask(1, nbytes)
            self._receive(nbytes, calls)
            t1 = _NOW()
            extent_id, address, _, handle = self._mapped.pop()
            self._extents.unmap(address, nbytes)
            self._extents.release(handle)
            self._top = address
            self._socket.send(_HEADER.pack(GIVE, 1, 0) + struct.pack("<I", extent_id))
            self._socket.recv(1)
            t2 = _NOW()
            mapped.append(round((t1 - t0) / 1e3, 1))
            returned.append(round((t2 - t1) / 1e3, 1))
        return {"mapped_us": mapped, "returned_us": returned}

    def hold_descriptor(self, nbytes: int) -> int:
        """Take one extent and keep its descriptor without importing it, as a keeper does."""
        self._ask(1, nbytes)
        message, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, MAX_DESCRIPTORS)
        self._kept = (struct.unpack("<I", message)[0], descriptors[0])
        return 1

    def drop_descriptor(self) -> int:
        extent_id, descriptor = self._kept
        os.close(descriptor)
        self._socket.send(_HEADER.pack(GIVE, 1, 0) + struct.pack("<I", extent_id))
        self._socket.recv(1)
        return 1

    def dirty(self) -> int:
        """Fill everything mapped with a pattern; returns the bytes."""
        import torch

        nbytes = self._top - self._base
        vmm.bytes_at(self._base, nbytes, self._device).fill_(0xA5)
        torch.cuda.synchronize()
        return nbytes

    def nonzero(self) -> int:
        """Count the bytes that are not zero in everything mapped."""
        import torch

        words = vmm.bytes_at(self._base, self._top - self._base, self._device).view(torch.int64)
        return sum(int(torch.count_nonzero(part).item()) for part in words.split(1 << 27))


def run_engine(device: int, control: Connection, connection: socket.socket, with_load: bool) -> None:
    """Body of an engine's process. With a load, it can also keep its own GPU queue full, or step as a neighbour."""
    import torch

    from benchmarks.gpu.decode_like import DecodeLike, Neighbour

    raise_descriptor_limit()
    engine = Engine(device, connection)
    load = DecodeLike(device) if with_load else None
    neighbour = Neighbour(load) if load else None
    torch.cuda.synchronize()
    control.send("ready")
    while (command := control.recv()) is not None:
        name, *arguments = command
        if name == "enqueue" and load:
            for _ in range(arguments[0]):
                load.step()
            control.send("done")
        elif name == "still_busy" and load:
            control.send(not load.stream.query())
        elif name == "drain":
            torch.cuda.synchronize()
            control.send("done")
        elif name == "start" and neighbour:
            neighbour.start()
            control.send("done")
        elif name == "stop" and neighbour:
            control.send(neighbour.stop())
        else:
            control.send(getattr(engine, name)(*arguments))
