"""PARD: a draft that proposes several tokens in one pass."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from compress.distill.draft.checks import check_ahead, check_cut, check_trained
from compress.distill.draft.config import CutConfig, DraftMethod
from compress.distill.draft.making import Making
from compress.distill.draft.parallel import ParallelStudent, no_masks
from compress.distill.draft.prospect import Prospect, RefusedError
from runtime.errors import RequestError


class PardConfig(CutConfig):
    """A draft that learns to read mask tokens in the place of what it has not written yet, so that one pass proposes all tokens.

    Without a token of its own in the tokenizer the mask is the one that the calibration text has least often.
    """

    method: Literal["pard"] = Field("pard", description="Name of the method.")
    data: Literal["given", "teacher"] = Field(
        "teacher", description="What is trained on: the calibration text, or what the artifact writes after it."
    )
    divergence: Literal["forward_kl", "reverse_kl", "js", "tvd", "cross_entropy"] = Field(
        "cross_entropy", description="What is made small; further tokens have no teacher but the text."
    )
    mask_token: int | None = Field(None, ge=0, description="Token that stands for one not known yet; none: the rarest.")
    keep: float = Field(0.7, gt=0, le=1, description="Share of places that each further mask keeps in training.")


def make(making: Making, config: PardConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    given, held_out = making.split()
    draft = making.cut(config)
    mask = config.mask_token
    if mask is None:
        mask = int(given.flatten().bincount(minlength=making.teacher.vocabulary).argmin())
    if mask >= making.teacher.vocabulary:
        raise RequestError(f"draft.mask_token: ids are below {making.teacher.vocabulary}, not {mask}")
    kept = making.kept(config.vocabulary, given)
    student = ParallelStudent(draft, mask, max(2, config.tokens), config.objective(), kept, config.keep)
    before = making.measure(config, student, held_out)
    making.train(config, student, making.source(config, student, given), held_out)
    making.write(config, student, parallel={"mask_token": mask, "tokens": student.levels})
    making.facts |= {"before": before, "after": making.measure(config, student, held_out)}
    making.settle(student)
    return {"model": making.output.name}


def check(config: PardConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_trained(config, target)
    check_ahead(config)
    draft = check_cut(config, target)
    if config.mask_token is not None and config.mask_token >= target.vocabulary:
        raise RefusedError("mask_token", f"ids are below {target.vocabulary}, not {config.mask_token}")
    reason = no_masks(draft)
    if reason is not None:
        raise RefusedError("method", reason)


METHOD = DraftMethod(
    name="pard",
    config=PardConfig,
    summary="a few layers of the artifact that propose several tokens in one pass",
    paper="An et al., PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation, 2025, arXiv 2504.18583",
    make=make,
    check=check,
)
