"""DistillSpec: a draft cut out of the artifact learns to say what the artifact says; SpecDec++: a head on it foresees acceptance."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors.torch import save_file

from compress.core.files import written_beside
from compress.distill.draft.checks import check_cut
from compress.distill.draft.config import CutConfig
from compress.distill.draft.student import Student
from compress.distill.draft.training import DraftMethod, DraftTraining
from compress.distill.draft.write import note
from compress.distill.train.data import TextRows
from compress.distill.train.teacher import Teacher
from compress.model.module_hooks import evaluating, hooks
from runtime.drafting.drafters.confident import DRAWN, FILE, GREEDY, AcceptHead


class DistillSpecConfig(CutConfig):
    """Some layers of the artifact under its own embeddings and head, trained towards its distribution, on text that either of them writes.

    The teacher is the artifact as it is stored, quantized and pruned, since that is what the draft will have to please. The weights of
    the best held-out acceptance are kept.
    """

    method: Literal["distillspec"] = Field("distillspec", description="Name of the method.")
    accept_head: bool = Field(
        False,
        description="Also train a head that foresees what will be accepted and ends drafts by it (SpecDec++, 2405.19715).",
    )


def make(training: DraftTraining, config: DistillSpecConfig) -> dict[str, Any]:
    """See `DraftMethod.make`; with a head that foresees acceptance where the config asks for one."""
    student = Student(training.cut(config), config.objective(), training.kept(config.vocabulary))
    drafter = training.run(config, student)
    if config.accept_head:
        given, held_out = training.split()
        source = training.source(config, student, given)
        rows = source if isinstance(source, TextRows) else TextRows(given)
        head, training.facts["accept_head"] = fit_accept_head(student, training.teacher, rows, held_out, config.seed)
        with written_beside(training.store.output / FILE) as temporary:
            save_file({name: tensor.to(torch.float16) for name, tensor in head.items()}, temporary)
        note(training.store.output, facts=training.facts, accept_head=True)
    return drafter


METHOD = DraftMethod(
    name="distillspec",
    config=DistillSpecConfig,
    summary="a few layers of the artifact, distilled towards it, draft token by token",
    paper="Zhou et al., DistillSpec, 2023, arXiv 2310.08461; vocabulary: VocabTrim, 2025, arXiv 2506.22694",
    make=make,
    check=check_cut,
)


# Accept head (SpecDec++, arXiv 2405.19715): it foresees whether the target will accept a token of a trained draft.

_EPOCHS, _BATCH, _RATE = 30, 256, 3e-3
MOST = 50_000  # positions that are learned from: their hidden states are in memory all at once


def fit_accept_head(
    student: Student, teacher: Teacher, rows: TextRows, held_out: TextRows, seed: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train the head of a draft that is trained already.

    Its labels are how likely the target accepts what the draft proposes: of its likeliest token, whether it is the target's too; of a
    token x drawn from it, min(1, p(x) / q(x)). It is trained with the cross entropy to these.

    Args:
        student: a draft that proposes token by token. It is not changed.
        teacher: the target. rows: text, whose trained positions count. held_out: on which the head is measured. Of either `MOST` positions
            at most, drawn evenly.
        seed: of the tokens that are drawn, the weights at first, and the order.

    Returns:
        The tensors of `runtime.drafting.drafters.confident.AcceptHead`, and what was measured: for greedy and sampling the cross entropy
        on held-out positions of the head, of the draft's own probability, and of the best constant.
    """
    generator = torch.Generator().manual_seed(seed)
    seen, unseen = (
        gather_examples(student, teacher, thinned(part, MOST, generator), generator) for part in (rows, held_out)
    )
    width, count = seen["states"].shape[1], len(seen["states"])
    mean = torch.stack([seen[f"{name}_label"].mean() for name in ("greedy", "sampling")]).clamp(1e-3, 1 - 1e-3)
    tensors = {  # at first the best constant
        "mix": torch.randn(width, width, generator=generator) * 0.02, "mix_bias": torch.zeros(width),
        "out": torch.zeros(2, width + 2), "out_bias": torch.logit(mean),
    }  # fmt: skip
    order = torch.randperm(count, generator=generator)
    kept_back, trained_on = order[: count // 8], order[count // 8 :]
    judged = {key: value[kept_back] for key, value in seen.items()}
    for tensor in tensors.values():
        tensor.requires_grad_()
    best = math.inf
    optimizer = torch.optim.AdamW(tensors.values(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS * -(-len(trained_on) // _BATCH))
    for epoch in range(1 + _EPOCHS):
        if epoch:
            for part in trained_on[torch.randperm(len(trained_on), generator=generator)].split(_BATCH):
                loss = _total(tensors, {key: value[part] for key, value in seen.items()})
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        now = float(_total(tensors, judged).detach())
        if not epoch or now < best:
            done, best = {name: tensor.detach().clone() for name, tensor in tensors.items()}, now
    return done, _measured(done, seen, unseen)


def _total(tensors: dict[str, torch.Tensor], examples: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(losses(tensors, examples).values())).sum()


def losses(tensors: dict[str, torch.Tensor], examples: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mean cross entropy to the labels, {"greedy", "sampling"}."""
    result = {}
    for name, output in (("greedy", GREEDY), ("sampling", DRAWN)):
        logits = AcceptHead(tensors)(examples["states"], examples[f"{name}_log_chance"], examples["entropy"])[:, output]
        result[name] = torch.nn.functional.binary_cross_entropy_with_logits(logits, examples[f"{name}_label"])
    return result


def thinned(rows: TextRows, most: int, generator: torch.Generator) -> TextRows:
    """Rows of which `most` trained positions count at most, those that were drawn; rows without any are left out."""
    places = rows.trained.flatten().nonzero()[:, 0]
    if len(places) <= most:
        return rows
    trained = torch.zeros(rows.trained.numel(), dtype=torch.bool)
    trained[places[torch.randperm(len(places), generator=generator)[:most]]] = True
    trained = trained.view_as(rows.trained)
    left = trained.any(1)
    return TextRows(rows.ids[left], trained[left], rows.kind)


@torch.no_grad()
def gather_examples(
    student: Student, teacher: Teacher, rows: TextRows, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Of all trained positions: states, the distribution's entropy, and for both ways the token's log-probability and its label."""
    parts: dict[str, list[torch.Tensor]] = {}
    states: list[torch.Tensor] = []
    head: Any = student.draft.get_output_embeddings()

    def keep(_module: Any, inputs: tuple[torch.Tensor]) -> None:
        states.append(inputs[0])

    with hooks({head: keep}, before=True), evaluating(student):
        for ids, trained in rows.parts(4):
            device = student.draft.device
            log_q = torch.log_softmax(student.logits(ids.to(device)).float(), -1)[trained].cpu()
            p = torch.softmax(teacher.logits(ids).float(), -1)[trained].cpu()
            drawn = torch.multinomial(log_q.exp(), 1, generator=generator)[:, 0]
            likeliest = log_q.argmax(-1)
            own = {
                "states": states.pop().float()[trained.to(device)].cpu(),
                "entropy": -(log_q.exp() * log_q).sum(-1),
                "greedy_log_chance": log_q.gather(1, likeliest[:, None])[:, 0],
                "sampling_log_chance": log_q.gather(1, drawn[:, None])[:, 0],
            }
            likeliest, drawn = (
                each if student.kept is None else student.kept.cpu()[each] for each in (likeliest, drawn)
            )
            own["greedy_label"] = (likeliest == p.argmax(-1)).float()
            ratio = p.gather(1, drawn[:, None])[:, 0] / own["sampling_log_chance"].exp()
            own["sampling_label"] = ratio.clamp_max(1.0)
            for name, value in own.items():
                parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}


@torch.no_grad()
def _measured(
    tensors: dict[str, torch.Tensor], seen: dict[str, torch.Tensor], unseen: dict[str, torch.Tensor]
) -> dict[str, Any]:
    found: dict[str, Any] = {"positions": len(seen["states"])}
    for name, loss in losses(tensors, unseen).items():
        label = unseen[f"{name}_label"]
        own = unseen[f"{name}_log_chance"].exp().clamp(1e-6, 1 - 1e-6)
        mean = seen[f"{name}_label"].mean().expand_as(label).clamp(1e-6, 1 - 1e-6)
        entropy = torch.nn.functional.binary_cross_entropy
        found[name] = {
            "head": float(loss),
            "draft": float(entropy(own, label)),
            "constant": float(entropy(mean, label)),
        }
    return found
