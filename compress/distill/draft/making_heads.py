"""What making heads works with, besides what making a draft model does (`compress.distill.draft.making`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import save_file

from compress.distill.draft.checks import check_ahead, check_trained
from compress.distill.draft.config import DraftConfig
from compress.distill.draft.directory import draft_directory
from compress.distill.draft.heads import HeadStudent, rank_rates
from compress.distill.draft.making import Making, read_bytes, round_trained
from compress.distill.draft.prospect import Prospect, RefusedError, plain_head
from compress.distill.draft.student import Student
from compress.distill.draft.write import note_facts
from compress.distill.train.data import TextRows, teacher_rows
from runtime.drafting.drafters.heads import KEPT, METHODS, SCHEMA_VERSION, WEIGHTS
from runtime.errors import RequestError

# A directory of trained heads: what `runtime.drafting.drafters.heads` describes and reads.


def write_heads(
    directory: str | Path,
    student: HeadStudent,
    facts: Mapping[str, Any],
    *,
    method: str,
    rates: list[list[float]],
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write heads; the directory is there whole or not at all.

    Args:
        directory: new, or an earlier draft's, which is replaced.
        student: trained.
        facts: JSON-able: acceptance before and after, the curve, ...
        method: "medusa" or "mtp".
        rates: of `rank_rates`.
        dtype: of the stored weights; vectors that are no weights (rotations) stay float32.

    Returns:
        The directory.

    Raises:
        RequestError: the directory holds something else, the method is unknown, or the target has no fingerprint.
    """
    directory = Path(directory)
    fingerprint = student.features.teacher.fingerprint
    if method not in METHODS:
        raise RequestError(f"heads are of {', '.join(METHODS)}, not {method!r}")
    module: Any = student.draft.module
    parameters = dict(module.named_parameters())
    tensors = {
        name: value.detach().to("cpu", dtype if name in parameters else value.dtype).contiguous()
        for name, value in module.state_dict().items()
    }
    if student.kept is not None:
        tensors[KEPT] = student.kept.to("cpu", torch.int32)
    content = {
        "schema_version": SCHEMA_VERSION, "method": method, "target": fingerprint, "vocabulary": student.vocabulary,
        "hidden": student.features.parts.hidden, "heads": student.sizes, "rates": rates, "facts": dict(facts),
    }  # fmt: skip
    with draft_directory(directory, content) as temporary:
        save_file(tensors, temporary / WEIGHTS)
    return directory


_RANKS = 8  # guesses of each head whose rates are measured


class HeadsConfig(DraftConfig):
    """Heads that read the artifact's own hidden states."""

    vocabulary: int | None = Field(
        None,
        ge=1,
        description="Tokens that the heads may propose, those that the artifact writes most (2506.22694, 2509.18362); none: all.",
    )
    decay: float = Field(
        0.8, gt=0, le=1, description="Weight of the loss of each further token, of that of the one before."
    )


def check_heads(config: HeadsConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    check_trained(config, target)
    check_ahead(config)
    what = type(target.model).__name__
    if not hasattr(target.model.get_output_embeddings(), "in_features"):
        raise RefusedError("method", f"a {what} shows no head, which heads of this kind need")
    if plain_head(target.model) is False:
        raise RefusedError("method", f"a {what} does more to its logits than its head; heads cannot be trained on it")


def make_heads(making: Making, config: HeadsConfig, student: HeadStudent) -> dict[str, Any]:
    """Train heads, measure them, and write them; see `DraftMethod.make`."""
    # The heads begin on the CPU and their projection where the target is: all of it goes there before it is asked for anything.
    student.to(making.teacher.device)
    # The target's states are computed once for the teacher and for the heads.
    own = replace(making, teacher=student.features.teacher)
    given, held_out = own.split()
    own.facts |= {"before": own.measure(config, student, held_out)}
    own.train(config, student, own.source(config, student, given), held_out)
    round_trained(student)
    own.facts |= {"after": own.measure(config, student, held_out)}
    size = sum(parameter.numel() for parameter in student.parameters() if parameter.requires_grad)
    read = size + student.head_weight.numel()  # 8 bits each
    own.note_cost(student, read, read_bytes(own.artifact, Student(student.draft)))
    write_heads(own.output, student, own.facts, method=config.method, rates=_rates(own, student, held_out))
    note_facts(own.output, own.facts)
    return {"model": own.output.name}


def _rates(making: Making, student: HeadStudent, held_out: TextRows) -> list[list[float]]:
    """Of what the artifact writes after held-out prompts, or of the held-out text where it cannot write."""
    rows = held_out
    if making.teacher.writes:
        prompt = max(1, held_out.length // 4)
        rows = teacher_rows(making.teacher, held_out.ids[:, :prompt], held_out.length - prompt)
    return rank_rates(student, rows, _RANKS)
