"""Options of `--target triton`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from export.target import Options

GPUS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}


class TritonOptions(Options):
    """What is compiled for what."""

    gpus: list[str] = Field(default_factory=lambda: list(GPUS))
    """GPUs to compile for: sm_80 (A100; its kernels also run on 8.6 and 8.9), sm_90 (H100, H200), sm_100 (B200)."""

    configs: Literal["all", "default"] = "all"
    """`all`: every launch configuration that tuning may choose, so that the GPU is tuned where it runs; `default`: the first ones."""

    dtype: Literal["bfloat16", "float16"] | None = None
    """What production computes in, as given to `runtime.load(dtype=...)`; None: the artifact's dtype."""

    @field_validator("gpus", mode="before")
    @classmethod
    def _names(cls, given: Any) -> list[str]:
        parts = given if isinstance(given, (list, tuple)) else str(given).split(",")
        names = [str(part).strip().lower() for part in parts]
        names = [name if name.startswith("sm") else f"sm_{name}" for name in names]
        for name in names:
            if name not in GPUS:
                raise ValueError(f"gpus must be among {', '.join(GPUS)} (or 80, 90, 100)")
        if not names:
            raise ValueError(f"gpus must name at least one of {', '.join(GPUS)}")
        return sorted(dict.fromkeys(names), key=lambda name: GPUS[name])

    @property
    def capabilities(self) -> list[int]:
        """80, 90, ..."""
        return [GPUS[name] for name in self.gpus]
