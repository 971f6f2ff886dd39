"""Hidden states of the calibration batches between two blocks: in memory, or one file a batch when they are large."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from compress.pipeline.files import sync_directory


class HiddenStates:
    """`count` tensors `[b, s, hidden]`. `spill` names a directory to keep them in instead of memory."""

    def __init__(self, count: int, spill: Path | None = None) -> None:
        self.count = count
        self.directory = spill
        self._memory: dict[int, torch.Tensor] = {}
        if spill is not None:
            shutil.rmtree(spill, ignore_errors=True)
            spill.mkdir(parents=True)

    def put(self, index: int, value: torch.Tensor) -> None:
        if self.directory is None:
            self._memory[index] = value.detach().clone()
        else:
            save_file({"hidden": value.detach().contiguous().cpu()}, self.directory / _name(index))

    def get(self, index: int) -> torch.Tensor:
        if self.directory is None:
            return self._memory[index]
        with safe_open(self.directory / _name(index), framework="pt") as file:
            return file.get_tensor("hidden")

    def persist(self, target: Path) -> None:
        """Make `target` a directory that `load` reads back, all of it or nothing (written beside, then renamed)."""
        temporary = target.with_name(target.name + ".tmp")
        if self.directory is None:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            for index, value in self._memory.items():
                save_file({"hidden": value.contiguous().cpu()}, temporary / _name(index))
        else:
            shutil.rmtree(temporary, ignore_errors=True)
            self.directory.rename(temporary)
            self.directory = target
        shutil.rmtree(target, ignore_errors=True)
        sync_directory(temporary, files=True)
        temporary.rename(target)
        sync_directory(target.parent)

    @classmethod
    def load(cls, source: Path, count: int, spill: bool) -> HiddenStates:
        """Read back what `persist` wrote; into memory unless `spill`."""
        states = cls(count)
        if spill:
            states.directory = source
        else:
            for index in range(count):
                with safe_open(source / _name(index), framework="pt") as file:
                    states._memory[index] = file.get_tensor("hidden")
        return states

    def drop(self) -> None:
        """Free the memory or the files."""
        self._memory.clear()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _name(index: int) -> str:
    return f"batch-{index:05d}.safetensors"
