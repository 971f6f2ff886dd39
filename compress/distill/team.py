"""The processes that make one draft together: one, or as many as a launcher has started (`accelerate launch`, `torchrun`).

Only training is shared. Until then every process prepares the same student, the main one first where something is kept on the disk; what
comes after training (measuring, writing) is the main process's alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from runtime.errors import RequestError

if TYPE_CHECKING:
    from accelerate import Accelerator

_PATIENCE = timedelta(days=30)  # others wait while the main process lets the teacher write, which may take hours
Value = TypeVar("Value")


class PartDone(Exception):  # noqa: N818
    """What this process had to do is done; the main one goes on."""


def launched() -> int:
    """Processes that a launcher has started, this one among them."""
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdigit() else 1


def is_first() -> bool:
    """Whether this is the main one of the processes that a launcher has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def refuse_several(command: str) -> None:
    """RequestError where `command`, which runs in one process, was launched in several."""
    if launched() > 1:
        raise RequestError(
            f"{command} runs in one process and was launched in {launched()} (WORLD_SIZE): run it without the launcher; the draft of a "
            "finished artifact can be trained by several with `accelerate launch -m compress.cli draft ARTIFACT RECIPE`"
        )


class Team:
    """The processes, as one of them sees them.

    Attributes:
        accelerator: joins them; None: there is only this one.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.accelerator = accelerator

    @classmethod
    def join(cls, device: str = "auto") -> Team:
        """All that the launcher has started; returns when all are there.

        Args:
            device: "auto" or "cpu"; each process has the GPU that its launcher gives it.
        """
        if launched() == 1:
            return cls()
        if device not in ("auto", "cpu"):
            raise RequestError(
                f"device {device!r}: each of {launched()} processes computes on the GPU that its launcher gives it; use auto or cpu"
            )
        from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs

        # A loss on hidden states alone reaches no head, and one width of several not all channels.
        kinds = [InitProcessGroupKwargs(timeout=_PATIENCE), DistributedDataParallelKwargs(find_unused_parameters=True)]
        return cls(Accelerator(cpu=device == "cpu", kwargs_handlers=kinds))

    @property
    def size(self) -> int:
        return 1 if self.accelerator is None else int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        return self.accelerator is None or bool(self.accelerator.is_main_process)

    def device(self, alone: torch.device) -> torch.device:
        """Where this process computes; `alone`: where a single one does."""
        return alone if self.accelerator is None or self.size == 1 else torch.device(self.accelerator.device)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The main process first, then the others, which find on the disk what it has left there."""
        if self.accelerator is None:
            yield
            return
        with self.accelerator.main_process_first():
            yield

    def agreed(self, value: Value) -> Value:
        """The main process's value, in all of them: kernels may round differently from process to process."""
        if self.size == 1:
            return value
        from accelerate.utils import broadcast_object_list

        held: list[Any] = [value]
        broadcast_object_list(held)
        return held[0]  # type: ignore[no-any-return]

    def meet(self) -> None:
        """Wait until all are here."""
        if self.accelerator is not None:
            self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """The processes part. One that ended with the others' connections open could be aborted by their threads."""
        if self.accelerator is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def leave(self) -> None:
        """End here (`PartDone`) in all but the main process."""
        if not self.is_main:
            raise PartDone


__all__ = ["PartDone", "Team", "launched", "refuse_several"]
