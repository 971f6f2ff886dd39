"""Options of the TensorRT target."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from export.target import Options


class TensorrtOptions(Options):
    """Options of the target; the numbers are limits that the engine is built for and cannot exceed later."""

    dtype: Literal["float16", "bfloat16", "float32"] | None = None
    """What is computed in; None: the artifact's."""
    bundle: bool = False
    """Write the build bundle and build no engine, also where one could be built."""
    require_engine: bool = False
    """Refuse (exit code 2) where no engine can be built."""
    network: Literal["auto", "native", "onnx"] = "auto"
    """The network always comes from TensorRT's ONNX parser; `native`, which earlier versions built of TensorRT's own layers, is
    said to be built so too."""
    max_batch: int = Field(8, ge=1)
    """Sequences in one step; larger batches are split."""
    max_length: int = Field(2048, ge=2)
    """Tokens of a sequence, prompt and answer together: the size of the cache. At most the model's context."""
    max_prompt: int = Field(512, ge=1)
    """Tokens of one prefill step; longer prompts are read in chunks."""
    optimum_batch: int = Field(1, ge=1)
    """The batch that kernels are chosen for."""
    optimum_prompt: int = Field(128, ge=1)
    """The prompt length that kernels are chosen for."""
    weight_streaming: bool = False
    """Let weights stay in the host's memory and stream in (`runtime.load(max_memory=...)` says how much may stay)."""
    refit: Literal["refit", "stripped"] | None = None
    """refit: weights can be exchanged later; stripped: the plan has no weights, they lie beside it and are put in when it is loaded."""
    version_compatible: bool = False
    """The plan also runs with later TensorRT versions (operators of the lean runtime only)."""
    hardware_compatibility: Literal["none", "ampere_plus", "same_compute_capability"] = "none"
    """Which other GPUs may run the plan."""
    timing_cache: str | None = None
    """File of measured kernel times, read and written; makes the next build of a similar engine quick."""
    workspace: int | str | None = None
    """Device memory that kernels may take while they are chosen: bytes, or a text such as "4GiB"; None: all."""
    optimization_level: int = Field(3, ge=0, le=5)
    """How long the builder searches, 0 to 5."""

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """A command line's `--set refit=none` is None."""
        if isinstance(values, dict):
            return {k: None if k == "refit" and v == "none" else v for k, v in values.items()}
        return values


#: Options that decide what is in the ONNX file: a bundle keeps those it was written with.
FIXED_BY_BUNDLE = ("dtype", "requantize")
