"""Hidden states of the calibration batches between two blocks: in memory, or one file a batch when they are large."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from compress.core.files import sync_directory
from compress.core.processes import Team
from runtime.errors import CompressError

SEEN_BY_ALL = (
    "all processes of a run must see one output directory (a shared filesystem, where they run on several machines)"
)


class HiddenStates:
    """`count` tensors `[b, s, hidden]`, in memory or in the directory `spill`.

    Of several processes that share a pass (`team`) each puts and gets its own; all persist together, into one directory.

    On disk there are always two generations: `get` reads the committed one and `put` writes the next, which `persist` commits.
    In memory `put` replaces at once. So what a resume starts from is never written over.
    """

    def __init__(self, count: int, spill: Path | None = None, team: Team | None = None) -> None:
        self.count = count
        self._scratch = spill
        self._current: Path | None = None
        self._memory: dict[int, torch.Tensor] = {}
        self._team = team or Team()
        if spill is not None:
            self._make(spill)

    def put(self, index: int, value: torch.Tensor) -> None:
        """Store a copy of the states of batch `index`, in memory or on disk."""
        if self._scratch is None:
            self._memory[index] = value.detach().clone()
        else:
            _write(self._scratch, index, value)

    def get(self, index: int) -> torch.Tensor:
        """Hidden states `[b, s, hidden]` of batch `index`."""
        if self._scratch is None:
            return self._memory[index]
        return read_batch(self._current or self._scratch, index)

    def persist(self, target: Path) -> None:
        """Make `target` a directory that `load` reads back, all of it or nothing (written beside, then renamed)."""
        temporary = self._scratch
        if temporary is None:
            temporary = target.with_name(target.name + ".tmp")
            self._make(temporary)
            for index, value in self._memory.items():
                _write(temporary, index, value)
        self._team.meet()
        if self._team.is_main:
            files = [temporary / batch_file(number) for number in range(self.count)]
            if missing := next((file for file in files if not file.is_file()), None):
                raise CompressError(f"{missing} is not seen by the main process: {SEEN_BY_ALL}")
            shutil.rmtree(target, ignore_errors=True)
            sync_directory(temporary, files=True)
            temporary.rename(target)
            sync_directory(target.parent)
        if self._scratch is not None:
            self._current = target
            self._make(self._scratch)

    def _make(self, directory: Path) -> None:
        """An empty directory, which the main process makes for all."""
        if self._team.is_main:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
        self._team.meet()
        if not directory.is_dir():
            raise CompressError(f"process {self._team.rank} does not see {directory}: {SEEN_BY_ALL}")

    @classmethod
    def load(
        cls,
        source: Path,
        count: int,
        spill: Path | None,
        team: Team | None = None,
        own: Collection[int] | None = None,
    ) -> HiddenStates:
        """Read back what `persist` wrote: into memory, or left on disk when `spill` names where the next generation goes.

        Args:
            own: which ones this process works on; None: all.
        """
        states = cls(count, spill, team)
        if spill is not None:
            states._current = source
        else:
            for index in range(count) if own is None else own:
                states._memory[index] = read_batch(source, index)
        return states

    def drop(self) -> None:
        """Free the memory, and the files that nothing will resume from."""
        self._memory.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def batch_file(index: int) -> str:
    """File name of the hidden states of one batch."""
    return f"batch-{index:05d}.safetensors"


def read_batch(directory: Path, index: int) -> torch.Tensor:
    """Hidden states `[b, s, hidden]` of one batch, as `HiddenStates` has written them."""
    return load_file(directory / batch_file(index))["hidden"]


def _write(directory: Path, index: int, value: torch.Tensor) -> None:
    save_file({"hidden": value.detach().contiguous().cpu()}, directory / batch_file(index))
