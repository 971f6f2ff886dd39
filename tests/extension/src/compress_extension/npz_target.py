"""Export target `npz`: every matrix of an artifact, dequantized, in one NumPy archive."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch

from export.source import Source
from export.target import Conversion, Job, Options, Target, Verification
from runtime.errors import CompressError

FILE = "weights.npz"


class NpzOptions(Options):
    """Options of `--target npz`."""

    dtype: Literal["float32", "float16"] = "float32"
    """What the numbers are stored in."""


class NpzTarget(Target):
    """One array a stored tensor, under the artifact's names."""

    name = "npz"
    summary = "All weights, dequantized, as NumPy arrays."
    packages = ("numpy",)
    options = NpzOptions

    def why_not(self, source: Source, options: NpzOptions) -> str | None:
        expert = source.compressed_expert
        return None if expert is None else f"{expert} is a routed expert's, whose matrices lie in one tensor"

    def conversions(self, source: Source, options: NpzOptions) -> list[Conversion]:
        what = f"weights become arrays of {options.dtype}"
        return [Conversion(what, tuple(source.shapes), exact=options.dtype == "float32")]

    def write(self, job: Job) -> None:
        names = [*job.source.entries, *job.source.dense_names()]
        job.progress.phase("writing arrays", len(names))
        arrays = {}
        for name in names:
            arrays[name] = self._array(job, name)
            job.progress.step(name)
        np.savez(job.folder / FILE, **arrays)
        job.facts["arrays"] = len(arrays)

    def verify(self, job: Job) -> Verification:
        with np.load(job.folder / FILE) as found:
            for name in found.files:
                if not np.array_equal(found[name], self._array(job, name)):
                    raise CompressError(f"{name} in {FILE} is not the artifact's")
            return Verification(f"numpy {np.__version__}", "every array, read back", {"arrays": len(found.files)})

    def usage(self, job: Job, folder: str) -> list[str]:
        return ["import numpy as np", f'weights = np.load("{folder}/{FILE}")', "print(weights.files)"]

    def _array(self, job: Job, name: str) -> Any:
        source = job.source
        tensor = source.weight(name).dequantize() if name in source.entries else source.dense(name)
        return tensor.to(getattr(torch, job.options.dtype)).numpy()
