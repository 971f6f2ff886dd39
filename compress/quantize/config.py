"""Fields that every quantization method has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.core.method import DEFAULTS, ColumnLoop
from runtime.errors import RequestError
from runtime.system.sizes import byte_count

CANDIDATES = (2, 3, 4, 5, 6, 8)
"""Bits that layers may get under a budget."""
_BUDGETS = ("bits", "size", "max_kl")


class QuantizeConfig(BaseModel):
    """Store weights as few-bit codes: a preset scheme by name, or bits, group size and symmetry; given fields win over the preset."""

    model_config = ConfigDict(extra="forbid")
    best_fields: ClassVar[Mapping[str, Any]] = {"objective": "propagated"}
    """Fields that `quality: best` sets."""

    method: str = Field(description="Name of the method, see `compress methods`.")
    scheme: str | dict[str, Any] | None = Field(
        None,
        description="Preset such as W4A16, W8A8-INT8, NVFP4, parts of which the other fields override; or another representation "
        "than a grid, {representation: NAME} and its fields.",
    )
    bits: int | float | None = Field(
        None,
        ge=2,
        le=8,
        description="Bits of a weight code: a whole number, 2 to 8 (4 when neither bits nor scheme is given). With a decimal point (3.5, "
        "also 3.0) it is a budget: average stored bits per weight, scales and zero points included. Layers that matter more get more.",
    )
    size: int | str | None = Field(
        None, description="Budget instead of bits: most bytes of all tensors of the artifact, such as 2.1GB."
    )
    max_kl: float | None = Field(
        None,
        gt=0,
        description="Budget instead of bits: most predicted KL divergence from the original, in nats per token.",
    )
    candidates: list[int | str | dict[str, Any]] | None = Field(
        None,
        min_length=2,
        description="Schemes that a budget chooses from: bits, presets, or fields such as {bits: 2, group_size: 32}. By default 2, 3, 4, "
        "5, 6 and 8 bits.",
    )
    group_size: int | Literal["channel", "tensor"] | None = Field(
        None,
        description="Columns that share a scale (128 by default); -1 or 'channel': one scale a row; 'tensor': one in all.",
    )
    symmetric: bool | None = Field(
        None, description="Zero is code 0 (true, the default) or every group has a zero point."
    )
    activations: Literal["int8", "int4", "fp8"] | None = Field(
        None, description="Quantize the inputs of the layer as well."
    )
    activation_mode: Literal["dynamic", "static"] | None = Field(
        None,
        description="Input scales: one a token at run time (dynamic, the default), or one in all from calibration (static).",
    )
    input_transform: str | None = Field(
        None,
        description="Change of basis of the layer's inputs before they and the weights are rounded, a small product a token at run time: "
        "hadamard, hadamard_groups (for each group of columns) or flatquant (learned), or another package's. outliers_last only reorders "
        "inputs.",
    )
    int8_channels: int | None = Field(
        None,
        ge=1,
        description="With int4 activations: so many input channels of a layer, the largest, are rounded to 8 bits (Atom). Activations "
        "then have groups like the weights, and this is a multiple of group_size.",
    )
    scales: Literal["hessian", "mse", "minmax", "positive"] = Field(
        "mse",
        description="How scales are found: least output error of a group, least weighted squared error, covering the range, or mse "
        "without negative scales, which TensorRT does not take.",
    )
    objective: Literal["layer", "propagated", "output"] = Field(
        "layer",
        description="What rounding keeps. layer: the outputs of the layer for its own inputs. propagated: its outputs in the original "
        "model, so that it makes up for the errors of the layers before it. output: the same, with errors moved to where they change the "
        "model's predictions least (gptq, or awq with solver gptq; decoders that read only text).",
    )
    quality: Literal["fast", "best"] = Field(
        "fast",
        description="best: lowest KL divergence, for three to six times the time. With gptq it sets objective: output and sweeps: 4, with "
        "other methods objective: propagated. Fields that are given win.",
    )
    targets: list[str] = Field(
        ["Linear"], description="Modules to quantize: a class, a glob or 're:' and a regular expression."
    )
    ignore: list[str] = Field(["lm_head"], description="Modules to leave alone; same language as targets.")

    @model_validator(mode="before")
    @classmethod
    def _set_best_fields(cls, given: Any) -> Any:
        best = isinstance(given, Mapping) and given.get("quality") == "best"
        return {**cls.best_fields, **given} if best else given

    @model_validator(mode="after")
    def _compensates(self) -> Self:
        if self.objective == "output" and self.column_loop() is None:
            raise ValueError(
                "objective output needs the column loop (method gptq, or awq with solver gptq); other methods have layer and propagated"
            )
        return self

    @model_validator(mode="after")
    def _one_budget(self) -> QuantizeConfig:
        given = [name for name in _BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: a stage has one of {', '.join(_BUDGETS)}")
        if self.candidates is not None and self.budget is None:
            raise ValueError(
                "candidates need a budget in the same stage: bits with a decimal point (3.5), size or max_kl"
            )
        if self.size is not None:
            try:
                byte_count("size", self.size)
            except RequestError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def budget(self) -> tuple[str, float] | None:
        """Key and amount (bits, bytes or nats) of what the layers may take or lose together; None: all are stored alike."""
        if isinstance(self.bits, float):
            return "bits", self.bits
        if self.size is not None:
            return "size", byte_count("size", self.size)
        return None if self.max_kl is None else ("max_kl", self.max_kl)

    def column_loop(self, base: ColumnLoop = DEFAULTS) -> ColumnLoop | None:
        """Settings of the column loop that makes up for the method's error in the weights that remain: `base` (defaults, or those of a
        pruning method in the same loop) with the method's own; None: nothing is made up for.
        """
        return None
