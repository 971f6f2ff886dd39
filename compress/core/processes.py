"""Processes that make one artifact or draft together: one, or as many as a launcher has started (`accelerate launch`, `torchrun`).

In `apply`, the main process runs the recipe and asks the others to share statistics, solving and training
(`compress.run.run.assist`). In `draft`, only training is shared: every process prepares the same student, the main one first where
files are written; measuring and writing are the main process's alone.

Processes wait for each other without a time limit. So a process that fails tells the others if they listen, and else closes its
connections, which makes the waiting ones fail too (where GPUs communicate among themselves, the launcher ends them).
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from compress.core.statistics import StatisticsCollector
from runtime.errors import CompressError, RequestError

if TYPE_CHECKING:
    from types import TracebackType

    from accelerate import Accelerator


_PATIENCE = timedelta(days=30)  # others wait while the main process lets the teacher write, which may take hours
# In errors of exchanges.
_LOST = ("gloo", "connection closed by peer", "connection reset by peer", "remote process exited")
Value = TypeVar("Value")


class PartDone(Exception):  # noqa: N818
    """This process has done its part; the main one goes on."""


def end_process(code: int) -> NoReturn:
    """End this process, one of several, with an exit code, and without unloading libraries.

    Threads that gloo still has when it is unloaded abort the process now and then ("terminate called without an active exception"), which
    a launcher takes for a failure after all is done.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def launched() -> int:
    """Processes that a launcher has started, this one among them."""
    return _from_launcher("WORLD_SIZE")


def on_this_machine() -> int:
    """Launched processes that share this machine's memory."""
    return max(1, _from_launcher("LOCAL_WORLD_SIZE"))


def _from_launcher(name: str) -> int:
    text = os.environ.get(name, "1")
    return int(text) if text.isdigit() else 1


def is_first() -> bool:
    """Whether this is the main one of the processes that a launcher has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


class Team:
    """The processes of a run, as one of them sees them; a context manager that closes their connections.

    Attributes:
        accelerator: joins them; None: there is only this one.
        size: number of processes. rank: number of this one. is_main: whether it has rank 0, the one that writes files.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.accelerator = accelerator
        self.size = 1 if accelerator is None else int(accelerator.num_processes)
        self.rank = 0 if accelerator is None else int(accelerator.process_index)
        self.is_main = self.rank == 0
        self._sharing = False  # all take part in the same computation, from a first exchange until `leave`
        self._apart = False  # nothing is exchanged any more

    @classmethod
    def join(cls, device: str = "auto") -> Team:
        """Join the processes that the launcher has started; returns when all are there.

        Args:
            device: "auto" or "cpu"; each process has the GPU that its launcher gives it.
        """
        if launched() == 1:
            return cls()
        if device not in ("auto", "cpu"):
            raise RequestError(
                f"device {device!r}: each of {launched()} processes has its launcher's GPU; use auto or cpu"
            )
        if "MASTER_ADDR" not in os.environ:
            raise RequestError(
                f"WORLD_SIZE says that {launched()} processes were started, but nothing says how they find each other (MASTER_ADDR): start "
                "them with torchrun or accelerate launch, or unset WORLD_SIZE"
            )
        # Imported once they are open, `functional` would hold on to the connections in its default arguments: `close` would close nothing.
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
        from torch.distributed.nn import functional  # noqa: F401

        # A loss on hidden states alone reaches no head, and one width of several not all channels.
        kinds = [InitProcessGroupKwargs(timeout=_PATIENCE), DistributedDataParallelKwargs(find_unused_parameters=True)]
        # Told nothing, accelerate joins no processes where there is no GPU.
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        accelerator = Accelerator(cpu=on_cpu, kwargs_handlers=kinds)
        if accelerator.num_processes != launched():
            raise CompressError(
                f"accelerate joins {accelerator.num_processes} of the {launched()} processes that were launched (WORLD_SIZE), so they "
                "would do the same work side by side: start them with torchrun or accelerate launch, without further ACCELERATE_* settings"
            )
        return cls(accelerator)

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections; CompressError in place of an error that only says that another process is gone."""
        self.close(error)
        if error is not None and _is_lost(error):
            raise CompressError(self._gone) from error

    def device(self, alone: torch.device) -> torch.device:
        """Where this process computes; `alone`: where a single one does."""
        return alone if self.accelerator is None or self.size == 1 else torch.device(self.accelerator.device)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The main process first, then the others, which find on the disk what it has left there.

        Raises:
            CompressError: in the others, where the main one failed.
        """
        if self.accelerator is None:
            yield
            return
        self._sharing = True
        if self.is_main:
            try:
                yield
            except BaseException as error:
                self._tell(error)
                raise
            self.broadcast(None)
            return
        failure: str | None = self.broadcast(None)
        if failure is not None:
            self.meet()
            self._apart = True
            raise CompressError(f"the run failed in the main process: {failure}")
        yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context of the main process while it asks the others to take part now and then.

        Where it fails while they take part, they may wait in any exchange, or compute for long, and cannot be told. So connections are
        closed, and later exchanges do nothing. Others that wait to be asked can be told, and are left alone.
        """
        try:
            yield
        except BaseException as error:
            lost = _is_lost(error)
            if self._sharing or lost:
                self.close(error)
            if lost:
                raise CompressError(self._gone) from error
            raise

    def broadcast(self, value: Value, rank: int = 0) -> Value:
        """The value of one process, the main one by default, in all of them: kernels may round differently from process to process."""
        if self.size == 1 or self._apart:
            return value
        from accelerate.utils import broadcast_object_list

        self._sharing = True
        values: list[Any] = [value]
        broadcast_object_list(values, from_process=rank)
        return values[0]  # type: ignore[no-any-return]

    def meet(self) -> None:
        """Wait until all are here."""
        if self.accelerator is not None and not self._apart:
            self.accelerator.wait_for_everyone()

    def close(self, error: BaseException | None = None) -> None:
        """Close the connections. A process that ended with open ones could be aborted by the threads of the others.

        Args:
            error: why, if not because all is done; the local variables of its finished frames are cleared.
        """
        self._apart = True
        if self.accelerator is None or not torch.distributed.is_initialized():
            return
        # A model wrapped for training holds the connections, too. As their last owner it would wait for their threads without giving up
        # the interpreter's lock, which these may need: a deadlock. `group` outlives it, and gives up the lock.
        group = torch.distributed.group.WORLD
        torch.distributed.destroy_process_group()
        for each in _chain(error):
            clear_frames(each.__traceback__)
        self.accelerator.free_memory()
        del group

    def done(self) -> None:
        """The shared computation is done: from here on the others wait to be asked again."""
        self._sharing = False

    def leave(self) -> None:
        """End here (`PartDone`) in all but the main process."""
        self._sharing = False
        if not self.is_main:
            raise PartDone

    # ------------------------------------------------------------ a pass over the blocks
    def mine(self, count: int) -> list[int]:
        """Numbers of the calibration batches, of `count`, that this process reads."""
        return list(range(self.rank, count, self.size))

    def owner(self, number: int) -> int:
        """Rank of the process that reads a calibration batch."""
        return number % self.size

    def add_up(self, collector: StatisticsCollector) -> None:
        """Make the sums of a collector those of what all processes have seen; all call it for the same collectors in the same order."""
        if self.size > 1:
            collector.pool(_all_reduce, self.rank, self.size)

    def deal(self, costs: Sequence[float]) -> list[int]:
        """The rank of each of some independent tasks: the costliest first, each to the process with the least load."""
        load = [0.0] * self.size
        owners = [0] * len(costs)
        for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
            owner = min(range(self.size), key=lambda rank: (load[rank], rank))
            owners[number] = owner
            load[owner] += costs[number]
        return owners

    def exchange(self, value: Value | None, owner: int) -> Value:
        """The value of process `owner` (the others give None), in all of them."""
        found = self.broadcast(value, owner)
        if found is None:
            raise CompressError(f"process {owner} has not solved its layers; this is a bug, nothing was written")
        return found

    def check_same(self, what: str, found: Any) -> None:
        """CompressError, in all, where the processes have come to different results of what each computes for itself."""
        every = [self.broadcast(found if self.rank == rank else None, rank) for rank in range(self.size)]
        if any(other != every[0] for other in every):
            raise CompressError(
                f"the {self.size} processes do not agree on {what}; run them on machines of one kind with one version of everything, or "
                "run a single process"
            )

    @property
    def _gone(self) -> str:
        return (
            f"another of the {self.size} processes has ended, which says why; where it says nothing, it was killed, most likely for "
            "memory. What was finished stays"
        )

    def _tell(self, error: BaseException) -> None:
        """The main process tells the others, which wait for their turn, why it does not come."""
        text = str(error).strip() or type(error).__name__
        with suppress(RuntimeError):  # they may be gone already
            self.broadcast(text)
            self.meet()  # a process that is gone before the others have heard it would abort them
        self._apart = True


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error and those that led to it."""
    found, waiting = list[BaseException](), [error]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in found:
            found.append(each)
            waiting += [each.__cause__, each.__context__]
    return found


def _is_lost(error: BaseException) -> bool:
    """Whether an error means that another process no longer answers."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST)


def _all_reduce(values: torch.Tensor, operation: str) -> None:
    torch.distributed.all_reduce(values, getattr(torch.distributed.ReduceOp, operation.upper()))
