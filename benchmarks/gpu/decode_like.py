"""A GPU load shaped like decoding: each step replays a CUDA graph that multiplies streamed weights with a vector."""

from __future__ import annotations

import threading
import time
from typing import Any


class DecodeLike:
    """One replay reads about `layers` x 117 MB, so it is bound by memory, as decode at small batch is."""

    def __init__(self, device: int = 0, layers: int = 16) -> None:
        import torch

        self._torch = torch
        torch.cuda.set_device(device)
        options: dict[str, Any] = {"device": f"cuda:{device}", "dtype": torch.bfloat16}
        wide, narrow = 14336, 4096
        self._weights = [torch.randn(wide, narrow, **options) / 64 for _ in range(layers)]
        self._x = torch.randn(narrow, **options)
        self.stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._layers()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._layers()
        self.step()
        self.stream.synchronize()

    def _layers(self) -> None:
        x = self._x
        for weight in self._weights:
            x = (weight @ x)[: x.shape[0]].tanh()

    def step(self) -> None:
        """Launch one step; does not wait."""
        with self._torch.cuda.stream(self.stream):
            self._graph.replay()


class Neighbour:
    """Steps of `DecodeLike` in a thread, each waited for as a decode loop waits for its tokens, until told to stop."""

    def __init__(self, load: DecodeLike) -> None:
        self._load, self._stop, self._steps = load, threading.Event(), []
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._steps = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> list[float]:
        """Milliseconds of each step since `start`."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        return self._steps

    def _run(self) -> None:
        while not self._stop.is_set():
            begun = time.perf_counter()
            self._load.step()
            self._load.stream.synchronize()
            self._steps.append(round((time.perf_counter() - begun) * 1e3, 4))
