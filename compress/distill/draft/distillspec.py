"""DistillSpec: a draft cut out of the artifact learns to say what the artifact says."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from compress.distill.draft.accept_head import fit_accept_head, save_accept_head
from compress.distill.draft.checks import Prospect, check_cut, check_trained
from compress.distill.draft.config import ChainConfig
from compress.distill.draft.student import Student
from compress.distill.draft.training import DraftMethod, DraftTraining
from compress.distill.draft.write import note
from compress.distill.train.data import TextRows


class DistillSpecConfig(ChainConfig):
    """Some layers of the artifact under its own embeddings and head, trained towards its distribution, on text that either of them writes.

    The teacher is the artifact as it is stored, quantized and pruned, since that is what the draft will have to please. The weights of
    the best held-out acceptance are kept.
    """

    method: Literal["distillspec"] = Field("distillspec", description="Name of the method.")


def make(training: DraftTraining, config: DistillSpecConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    student = Student(training.cut(config), config.objective(), training.kept(config.vocabulary))
    drafter = training.run(config, student)
    if config.accept_head:
        given, held_out = training.split()
        source = training.source(config, student, given)
        rows = source if isinstance(source, TextRows) else TextRows(given)
        head, training.facts["accept_head"] = fit_accept_head(student, training.teacher, rows, held_out, config.seed)
        save_accept_head(training.output, head)
        note(training.output, facts=training.facts, accept_head=True)
    return drafter


def check(config: ChainConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_trained(config, target)
    check_cut(config, target)


METHOD = DraftMethod(
    name="distillspec",
    config=DistillSpecConfig,
    summary="a few layers of the artifact, distilled towards it, draft token by token",
    paper="Zhou et al., DistillSpec, 2023, arXiv 2310.08461; vocabulary: VocabTrim, 2025, arXiv 2506.22694",
    make=make,
    check=check,
)
