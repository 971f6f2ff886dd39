"""S2D: one draft whose first layers are drafts by themselves."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from compress.distill.draft.checks import check_cut, check_trained
from compress.distill.draft.config import CutConfig, DraftMethod
from compress.distill.draft.making import Making
from compress.distill.draft.nested import NestedStudent, final_norm
from compress.distill.draft.prospect import Prospect, RefusedError, plain_head
from runtime.errors import RequestError
from runtime.modeling.skeleton import find_blocks


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
    student = NestedStudent(draft, depths, config.objective(), making.kept(config.vocabulary, given))
    before = {depth: making.measure(config, student.at(depth), held_out) for depth in depths}
    making.train(config, student, making.source(config, student, given), held_out)
    making.write(config, student, depths=depths)
    after = {depth: making.measure(config, student.at(depth), held_out) for depth in depths}
    making.facts |= {"before": before[layers], "after": after[layers], "depths": depths}
    making.facts["by_depth"] = {str(depth): {"before": before[depth], "after": after[depth]} for depth in depths}
    making.settle(student)
    return {"model": making.output.name}


def check(config: S2DConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_trained(config, target)
    draft = check_cut(config, target)
    layers = len(find_blocks(draft)[1])
    if config.depths is not None and any(not 1 <= depth <= layers for depth in config.depths):
        raise RefusedError("depths", f"1 to {layers}, the draft's own layers, not {config.depths}")
    try:
        final_norm(draft)
    except RequestError as error:
        raise RefusedError("method", str(error)) from None
    if plain_head(draft) is False:
        text = f"a {type(draft).__name__} does more to its logits than norm and head; it cannot be nested"
        raise RefusedError("method", text)


METHOD = DraftMethod(
    name="s2d",
    config=S2DConfig,
    summary="a draft that is one at several depths, and goes no deeper than it must",
    paper="Kavehzadeh et al., S2D: Sorted Speculative Decoding, 2024, arXiv 2407.01955",
    make=make,
    check=check,
)
