"""MatFormer: one checkpoint whose feed-forward prefixes are valid smaller models."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from compress.core.method import Method
from compress.core.percent import fraction
from compress.distill.recover.config import RecoverConfig

Share = Annotated[float, BeforeValidator(fraction), Field(gt=0, le=1)]


class MatFormerConfig(RecoverConfig):
    """Train the model and its prefixes together: of every feed-forward network the first channels, for each of the widths.

    What comes of it is one checkpoint; `structure: {method: prefix, keep: N}` makes any of the smaller ones of it, without training.
    """

    nested: ClassVar[bool] = True
    method: Literal["matformer"] = Field("matformer", description="Name of the method.")
    widths: list[Share] = Field(
        [0.25, 0.5, 0.75, 1.0],
        min_length=2,
        description="Shares of the channels that are a model by themselves, ascending; the last is the whole.",
    )
    order: bool = Field(
        True,
        description="Put the channels in the order of what they add to the output before training; the model computes the same then.",
    )

    @model_validator(mode="after")
    def _ascending(self) -> MatFormerConfig:
        if self.widths != sorted(set(self.widths)) or self.widths[-1] != 1:
            raise ValueError(f"widths must be ascending, and the last one 1 (100%), not {self.widths}")
        return self


METHOD = Method(
    name="matformer",
    config=MatFormerConfig,
    summary="trains nested widths: the first channels of every feed-forward network are smaller models",
    paper="Devvrit et al., MatFormer: Nested Transformer for Elastic Inference, 2023, arXiv 2310.07707",
)
