"""Fields that every quantization method has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compress.core.method import DEFAULTS, ColumnLoop


class QuantizeConfig(BaseModel):
    """Store weights as few-bit codes: a preset scheme by name, or bits, group size and symmetry; given fields win over the preset."""

    model_config = ConfigDict(extra="forbid")
    best: ClassVar[Mapping[str, Any]] = {"objective": "propagated"}
    """Fields that `quality: best` sets."""

    method: str = Field(description="Name of the method, see `compress methods`.")
    scheme: str | dict[str, Any] | None = Field(
        None,
        description="Preset such as W4A16, W8A8-INT8, NVFP4, parts of which the other fields override; or another representation "
        "than a grid, {representation: NAME} and its fields.",
    )
    bits: int | None = Field(
        None, ge=2, le=8, description="Bits of a weight code, 2 to 8 (4 when neither bits nor scheme is given)."
    )
    group_size: int | Literal["channel", "tensor"] | None = Field(
        None,
        description="Columns that share a scale (128 by default); -1 or 'channel': one scale a row; 'tensor': one in all.",
    )
    symmetric: bool | None = Field(
        None, description="Zero is code 0 (true, the default) or every group has a zero point."
    )
    activations: Literal["int8", "fp8"] | None = Field(None, description="Quantize the inputs of the layer as well.")
    activation_mode: Literal["dynamic", "static"] | None = Field(
        None,
        description="Input scales: one a token at run time (dynamic, the default), or one in all from calibration (static).",
    )
    scales: Literal["hessian", "mse", "minmax", "positive"] = Field(
        "mse",
        description="How scales are found: least output error of a group, least weighted squared error, covering the range, or mse "
        "without negative scales, which TensorRT does not take.",
    )
    objective: Literal["layer", "propagated", "output"] = Field(
        "layer",
        description="What is kept: outputs that the layer gives for its own inputs; (propagated) those that it gives in the original "
        "model, so that it makes up for the errors of the layers before it; or (output) those too, with errors where what the model says "
        "minds them least.",
    )
    quality: Literal["fast", "best"] = Field(
        "fast",
        description="best: the objective and the sweeps that lose least, for three to five times the time; fields that are given win.",
    )
    targets: list[str] = Field(
        ["Linear"], description="Modules to quantize: a class, a glob or 're:' and a regular expression."
    )
    ignore: list[str] = Field(["lm_head"], description="Modules to leave alone; same language as targets.")

    @model_validator(mode="before")
    @classmethod
    def _best(cls, given: Any) -> Any:
        best = isinstance(given, Mapping) and given.get("quality") == "best"
        return {**cls.best, **given} if best else given

    @model_validator(mode="after")
    def _compensates(self) -> Self:
        if self.objective == "output" and self.column_loop() is None:
            raise ValueError(
                "objective output needs the column loop (method gptq, or awq with solver gptq); other methods have layer and propagated"
            )
        return self

    def column_loop(self, base: ColumnLoop = DEFAULTS) -> ColumnLoop | None:
        """Settings of the column loop that makes up for the method's error in the weights that remain: `base` (defaults, or those of a
        pruning method in the same loop) with the method's own; None: nothing is made up for.
        """
        return None
