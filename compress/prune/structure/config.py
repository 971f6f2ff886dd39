"""Recipe fields of the stage `structure`, and the axes along which it can cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from compress.core.percent import fraction

Remove = Literal["ffn", "heads", "layers", "experts", "hidden", "vocabulary"]
Share = Annotated[float, BeforeValidator(fraction), Field(gt=0, lt=1)]


@dataclass(frozen=True)
class Axis:
    """An axis along which a model can be cut.

    Attributes:
        multiple: the number kept is a multiple of this, unless a recipe gives another.
        fitted: the layers that are refitted to their outputs before; empty: none.
    """

    multiple: int = 1
    fitted: str = ""


AXES: dict[Remove, Axis] = {
    "ffn": Axis(32, "readers"), "heads": Axis(1, "readers"), "layers": Axis(), "experts": Axis(), "hidden": Axis(32, "layers"),
    "vocabulary": Axis(32),
}  # fmt: skip


class Budget(BaseModel):
    """Budget of the smaller model, as a share of the whole one; exactly one field."""

    model_config = ConfigDict(extra="forbid")

    parameters: Share | None = Field(None, description="Share of its parameters.")
    flops: Share | None = Field(None, description="Share of the operations that a token takes.")
    latency: Share | None = Field(None, description="Share of the time that a token takes to decode here, measured.")

    @model_validator(mode="after")
    def _one(self) -> Budget:
        if len(self.given) != 1:
            raise ValueError("a budget is one of parameters, flops and latency")
        return self

    @property
    def given(self) -> dict[str, float]:
        """The field that was given."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}


class StructureConfig(BaseModel):
    """Remove whole channels, heads, layers or dimensions: the shapes shrink, and the result is an ordinary checkpoint."""

    model_config = ConfigDict(extra="forbid")

    method: str = Field(description="How what is removed is ranked, see `compress methods`.")
    remove: Remove = Field(
        "ffn",
        description="What: channels of the feed-forward networks, heads (grouped-query groups as a whole), layers, experts (of each layer "
        "as many), dimensions of the hidden state, or tokens of the vocabulary.",
    )
    ratio: Share | None = Field(None, description="Share of them that is removed.")
    keep: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="How many are kept, in the place of a ratio; of channels also a list, with a number for each layer.",
    )
    budget: Budget | None = Field(
        None,
        description="What the model may still take, in the place of a ratio: {parameters: 80%}, {flops: 80%}, {latency: 80%}.",
    )
    allocation: Literal["uniform", "error"] = Field(
        "uniform",
        description="Channels: every layer keeps as many (uniform), or more where their loss does more harm (error): a pass over the model "
        "measures it, and as many stay in all.",
    )
    multiple: int | None = Field(
        None,
        ge=1,
        description="What is kept is a multiple of this; none: 32 channels, dimensions or tokens, one head, layer or expert.",
    )
    reconstruct: bool = Field(
        True,
        description="Fit layers to what they gave before, by least squares over calibration inputs: those that read channels or heads; "
        "where dimensions of the hidden state go, all linear layers that read or write them. Where layers, experts or tokens go there is "
        "nothing to fit.",
    )
    damping: float = Field(0.01, gt=0, le=1, description="Of the least squares, as a share of the mean second moment.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of random choices.")

    @model_validator(mode="after")
    def _one_amount(self) -> StructureConfig:
        given = [name for name in ("ratio", "keep", "budget") if getattr(self, name) is not None]
        if len(given) != 1:
            found = "none of them is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"the amount is given by one of ratio, keep and budget; {found}")
        # Written with all its defaults a recipe must ask for nothing that it is refused for.
        if not self.axis.fitted and "reconstruct" not in self.model_fields_set:
            self.reconstruct = False
        return self

    @model_validator(mode="after")
    def _by_layer(self) -> StructureConfig:
        if self.remove != "ffn" and (isinstance(self.keep, list) or self.allocation != "uniform"):
            what = "keep is one number, not a list," if isinstance(self.keep, list) else "allocation is uniform"
            raise ValueError(
                f"{what} where {self.remove} go: only the widths of feed-forward networks can differ from layer to layer"
            )
        if isinstance(self.keep, list) and self.allocation != "uniform":
            raise ValueError("a list of keep says how many each layer keeps; leave allocation out")
        if self.allocation != "uniform" and isinstance(self.keep, int) and self.keep % self.multiple_of:
            raise ValueError(
                f"layers keep multiples of {self.multiple_of} (multiple), and so in the mean; keep {self.keep} is none: set multiple"
            )
        return self

    @property
    def axis(self) -> Axis:
        """The axis that is cut."""
        return AXES[self.remove]

    @property
    def multiple_of(self) -> int:
        """The number kept is a multiple of this."""
        return self.axis.multiple if self.multiple is None else self.multiple
