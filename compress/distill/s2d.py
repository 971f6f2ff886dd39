"""S2D: one draft whose first layers are drafts by themselves."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from compress.distill.config import CutConfig, DraftMethod
from compress.distill.making import Making
from compress.distill.nested import NestedStudent
from runtime.errors import RequestError


class S2DConfig(CutConfig):
    """A draft that is trained at several depths at once, under one norm and head: where its shallow part is sure of a token the others
    are not computed, and one draft serves targets of several sizes."""

    method: Literal["s2d"] = Field("s2d", description="Name of the method.")
    depths: list[int] | None = Field(
        None,
        description="Numbers of the draft's first layers that draft by themselves; its own depth is always one. None: every number.",
    )


def make(making: Making, config: S2DConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    given, held_out = making.split()
    draft = making.cut(config)
    layers = int(draft.config.num_hidden_layers)
    depths = sorted({*(config.depths or range(1, layers + 1)), layers})
    if depths[0] < 1 or depths[-1] > layers:
        raise RequestError(f"draft.depths: 1 to {layers}, the draft's own layers, not {config.depths}")
    student = NestedStudent(draft, depths, config.objective(), making.kept(config, given))
    before = {depth: making.measure(config, student.at(depth), held_out) for depth in depths}
    making.train(config, student, making.source(config, student, given), held_out)
    after = {depth: making.measure(config, student.at(depth), held_out) for depth in depths}
    making.facts |= {"before": before[layers], "after": after[layers], "depths": depths}
    making.facts["by_depth"] = {str(depth): {"before": before[depth], "after": after[depth]} for depth in depths}
    making.settle(config, student, depths=depths)
    return {"model": making.output.name}


METHOD = DraftMethod(
    name="s2d",
    config=S2DConfig,
    summary="a draft that is one at several depths, and goes no deeper than it must",
    paper="Kavehzadeh et al., S2D: Sorted Speculative Decoding, 2024, arXiv 2407.01955",
    make=make,
)
