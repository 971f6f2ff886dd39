"""What an engine is compared with: the artifact itself, or, where TensorRT cannot hold it, the artifact with the same change made."""

from __future__ import annotations

from export.changed import Change, Expected, expect_changed
from export.onnx.grid import TENSORRT
from export.target import Job
from export.tensorrt.fits import dropped_activations
from export.verify import probe

__all__ = ["Expected", "changed_modules", "expect"]


def changed_modules(job: Job) -> list[str]:
    """Layers that do not compute what they do in the artifact; `job.losses` is filled by the writer."""
    names = {*job.losses, *dropped_activations(job.source)}
    return [name for name in job.source.entries if name in names]


def expect(job: Job) -> Expected:
    """Run the artifact, and where it is changed the changed one, on the CPU in float32. One model is in memory at a time."""
    if not changed_modules(job):
        return Expected(probe(job))
    return expect_changed(job.source, Change(TENSORRT, frozenset(job.losses), dropped_activations(job.source)))
