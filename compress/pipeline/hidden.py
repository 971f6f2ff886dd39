"""Hidden states of the calibration batches between two blocks: in memory, or one file a batch when they are large."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.pipeline.files import sync_directory


class HiddenStates:
    """`count` tensors `[b, s, hidden]`. `spill` names a directory to keep them in instead of memory.

    On disk there are always two generations: `get` reads the committed one and `put` writes the next, which `persist` commits.
    In memory `put` replaces at once. So what a resume starts from is never written over.
    """

    def __init__(self, count: int, spill: Path | None = None) -> None:
        self.count = count
        self._scratch = spill
        self._current: Path | None = None
        self._memory: dict[int, torch.Tensor] = {}
        if spill is not None:
            shutil.rmtree(spill, ignore_errors=True)
            spill.mkdir(parents=True)

    def put(self, index: int, value: torch.Tensor) -> None:
        if self._scratch is None:
            self._memory[index] = value.detach().clone()
        else:
            save_file({"hidden": value.detach().contiguous().cpu()}, self._scratch / batch_file(index))

    def get(self, index: int) -> torch.Tensor:
        if self._scratch is None:
            return self._memory[index]
        with safe_open((self._current or self._scratch) / batch_file(index), framework="pt") as file:
            return file.get_tensor("hidden")

    def persist(self, target: Path) -> None:
        """Make `target` a directory that `load` reads back, all of it or nothing (written beside, then renamed)."""
        if self._scratch is None:
            temporary = target.with_name(target.name + ".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for index, value in self._memory.items():
                save_file({"hidden": value.contiguous().cpu()}, temporary / batch_file(index))
        else:
            temporary = self._scratch
        shutil.rmtree(target, ignore_errors=True)
        sync_directory(temporary, files=True)
        temporary.rename(target)
        sync_directory(target.parent)
        if self._scratch is not None:
            self._scratch.mkdir(parents=True)
            self._current = target

    @classmethod
    def load(cls, source: Path, count: int, spill: Path | None) -> HiddenStates:
        """Read back what `persist` wrote: into memory, or left on disk when `spill` names where the next generation goes."""
        states = cls(count, spill)
        if spill is not None:
            states._current = source
        else:
            for index in range(count):
                with safe_open(source / batch_file(index), framework="pt") as file:
                    states._memory[index] = file.get_tensor("hidden")
        return states

    def drop(self) -> None:
        """Free the memory, and the files that nothing will resume from."""
        self._memory.clear()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def batch_file(index: int) -> str:
    return f"batch-{index:05d}.safetensors"
