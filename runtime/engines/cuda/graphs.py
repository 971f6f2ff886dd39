"""Capture of a computation over static tensors, to be replayed: a CUDA graph, or on other devices the computation itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

Computation = Callable[[], torch.Tensor]


class Captured(Protocol):
    """A computation that can be repeated.

    Attributes:
        output: what the last replay computed; the next replay of any graph of the same `Capture` may overwrite it.
    """

    output: torch.Tensor

    def replay(self) -> None:
        """Compute again, from what the static tensors hold now."""


#: Makes one of a computation. May run it any number of times, so running it twice must be like running it once.
Capture = Callable[[Computation], Captured]


class Plain:
    """No graph: every replay calls."""

    def __init__(self, compute: Computation) -> None:
        self._compute = compute
        self.output = torch.empty(0)

    def replay(self) -> None:
        self.output = self._compute()


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool. They are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[_Graph] = weakref.WeakSet()

    def __call__(self, compute: Computation) -> Captured:
        if not self._alive:  # a memory pool whose last graph is gone cannot be captured into again
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # kernels are compiled and tuned, libraries take their workspaces
                compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, for other models.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        made = _Graph(graph, output)
        self._alive.add(made)
        return made


class _Graph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self.graph, self.output = graph, output

    def replay(self) -> None:
        self.graph.replay()
