"""Ranks of tensor parallelism: the processes that compute one model together, one on each device, as one of them sees the others.

Every rank makes the same calls in the same order, and schedules for itself. Ranks must come to the same decisions, or they wait for each
other forever. They do by construction:

- tokens are those that rank 0 has chosen (`chosen`): sampling on GPUs is not deterministic to the last bit. Logits are gathered
  (`all_gather`), so each rank has the bytes that the others have computed, whatever kernels they chose. Sums (`all_reduce`) are
  added in one place and then sent to all, by every algorithm of gloo and NCCL, so they have the same bits everywhere too;
- seeds are those of rank 0 where the caller gives none (`first`);
- what depends on free memory depends on the least of all ranks (`least`), and memory with captured graphs is used again by all or none;
- nothing else that a rank decides depends on time or on other threads: calls come from one thread (`check_call`), and what would
  decide by time (drafts), by events of one process (`cancel`) or by when something is collected (sessions) is refused;
- a call that one rank refuses is refused on all (`refusing_alike`).
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from runtime.errors import RequestError
from runtime.system.device import choose_device

MOST = 8
_PATIENCE = timedelta(days=30)  # between two calls: ranks wait for the slowest to be asked
Value = TypeVar("Value")
# torch 2.13 has given it another name.
_gather: Any = getattr(distributed, "all_gather_single", None) or getattr(distributed, "all_gather_into_tensor", None)


class _Refusal(str):
    """Why a rank refused what it was asked for."""

    __slots__ = ()


class DisagreementError(RequestError):
    """Ranks are asked for different things, or one has refused: all raise it."""


class Ranks:
    """The ranks of one model.

    Attributes:
        rank: number of this one. size: how many there are. device: of this one.
    """

    def __init__(self, device: torch.device) -> None:
        """Of the process group that torch has; all ranks make it."""
        self.device = device
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._host: Any = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self._group: Any = self._host if device.type == "cpu" else distributed.new_group(backend="nccl")
        self._thread: int | None = None

    @classmethod
    def join(cls, size: int, device: torch.device) -> Ranks:
        """Join the processes that a launcher has started; returns when all are there.

        Args:
            size: how many there must be.
            device: of this process (`rank_device`).

        Raises:
            RequestError: there are not so many processes, or two would use one GPU.
        """
        how = f"start them with torchrun --nproc-per-node {size} SCRIPT"
        if not distributed.is_available():
            raise RequestError("tensor_parallel: this torch was built without torch.distributed")
        if not distributed.is_initialized():
            started = os.environ.get("WORLD_SIZE", "1")
            if started != str(size) or "MASTER_ADDR" not in os.environ or "RANK" not in os.environ:
                raise RequestError(f"tensor_parallel={size} takes {size} processes, and {started} was launched; {how}")
            distributed.init_process_group("gloo")
            atexit.register(_leave)
        if distributed.get_world_size() != size:
            raise RequestError(
                f"tensor_parallel={size} takes {size} processes, and torch.distributed joins {distributed.get_world_size()}; {how}"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        ranks = cls(device)
        ranks._check_devices()
        return ranks

    def _check_devices(self) -> None:
        name = "cpu"
        if self.device.type == "cuda":
            name = f"{socket.gethostname()} {torch.cuda.get_device_properties(self.device).uuid}"
        every = self.every(name)
        kinds = {each == "cpu" for each in every}
        if len(kinds) > 1 or (kinds == {False} and len(set(every)) < self.size):
            raise RequestError(
                "tensor_parallel: each rank computes on a GPU of its own, or all compute on CPUs; leave out device"
            )

    # ---------------------------------------------------------------- in steps, on the device
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place where it can be; the same bits in each.

        May be captured in a CUDA graph once it has run outside of one.
        """
        x = x.contiguous()
        distributed.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x` `[rows, ...]`, of one shape on all ranks, of each of them. May be captured likewise."""
        found = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _gather(found, x.contiguous(), group=self._group)
        return list(found.split(x.shape[0]))

    def chosen(self, x: torch.Tensor) -> torch.Tensor:
        """What rank 0 has, in the place of `x`, on this rank's device."""
        distributed.broadcast(x, 0, group=self._group)
        return x

    # ---------------------------------------------------------------- between steps, on the host
    def every(self, value: Value) -> list[Value]:
        """What each rank says."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._host)
        return found

    def first(self, value: Value) -> Value:
        """What rank 0 says."""
        return self.every(value)[0]

    def least(self, number: int) -> int:
        """The smallest that a rank says."""
        return min(self.every(number))

    def check_same(self, what: str, value: Any) -> None:
        """DisagreementError, on all ranks, where they do not say the same, or one has refused (`refusing_alike`)."""
        every = self.every(value)
        for rank, each in enumerate(every):
            if isinstance(each, _Refusal) and not isinstance(value, _Refusal):
                raise DisagreementError(f"tensor_parallel: rank {rank} refused: {each}")
        if isinstance(value, _Refusal):  # its own reason is better
            return
        other = next((rank for rank, each in enumerate(every) if each != every[0]), None)
        if other is not None:
            raise DisagreementError(
                f"tensor_parallel: {what} of rank {other} is not that of rank 0; all ranks make the same calls"
            )

    @contextmanager
    def refusing_alike(self) -> Iterator[None]:
        """Around what reads a call up to its `check_call`: where it is refused on one rank, the others' `check_call` raises too."""
        try:
            yield
        except DisagreementError:
            raise
        except Exception as error:
            self.check_same("", _Refusal(error))
            raise

    def check_call(self, what: str, asked: Any) -> None:
        """RequestError where calls come from two threads, whose order may differ between ranks; DisagreementError, on all, where ranks are
        asked for different things."""
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            raise RequestError(
                "tensor_parallel: calls of several threads reach the ranks in different orders; make all calls in one thread"
            )
        self.check_same(what, hashlib.sha256(repr(asked).encode()).hexdigest())


def rank_device(device: str | torch.device) -> torch.device:
    """The device of this process: of "auto" and "cuda" the GPU whose number is the process's on its machine (LOCAL_RANK).

    Raises:
        RequestError: there is no such device, or ranks cannot compute on it.
    """
    if str(device) in ("auto", "cuda") and torch.cuda.is_available():
        chosen = torch.device("cuda")  # and nothing is put on the first GPU, which is another rank's
    else:
        chosen = choose_device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise RequestError(f"tensor_parallel: ranks compute on CUDA GPUs or, for tests, on CPUs, not on {chosen.type}")
    if chosen.type != "cuda" or chosen.index is not None:
        return chosen
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count > 1 and local >= count:
        raise RequestError(f"tensor_parallel: process {local} of this machine has no GPU of its own, there are {count}")
    return torch.device("cuda", local if count > 1 else 0)  # a launcher may show each process its own GPU only


def _leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
