"""Result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import CompressError


@dataclass
class AppliedArtifact:
    """What `apply` gives back.

    Attributes:
        path: directory of the artifact.
        metrics: quality, sizes and limits, as in the manifest.
        manifest: content of compress.json.
        seconds: wall-clock time of each phase of this run (a resumed run counts only what it did itself).
        peak_memory: largest resident memory of the process, in bytes; of several, of the one that took most.
    """

    path: Path
    metrics: dict[str, Any]
    manifest: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory: int = 0
    warnings: list[str] = field(default_factory=list)


class LimitError(CompressError):
    """The artifact is complete, but worse than the recipe's `evaluate` limits allow. `result` is what `apply` would have returned."""

    def __init__(self, message: str, result: AppliedArtifact) -> None:
        super().__init__(message)
        self.result = result
