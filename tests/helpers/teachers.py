"""Teachers, features and measured acceptance of transformers models in memory, as `runtime.load`'s models give them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from compress.distill.draft.acceptance import Texts, measure_acceptance, target_texts
from compress.distill.draft.features import Features
from compress.distill.draft.student import Student
from compress.distill.train.data import TextRows, continuations
from compress.distill.train.teacher import Teacher
from compress.model.module_hooks import evaluating
from runtime.api.model import Model


def teacher_of(model: Any, fingerprint: str = "") -> Teacher:
    """A model of transformers, or what `runtime.load` returned."""
    if isinstance(model, Model):
        return Teacher.of(model)
    config = model.config.get_text_config(decoder=True)
    end = config.eos_token_id
    ends = frozenset([end] if isinstance(end, int) else end or [])

    def forward(ids: torch.Tensor) -> torch.Tensor:
        with evaluating(model):
            logits: torch.Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
        return logits

    write = partial(continuations, model, ends=ends)
    return Teacher(forward, config.vocab_size, fingerprint, ends, model.device, write, model)


def logits_teacher(forward: Callable[[torch.Tensor], torch.Tensor], vocabulary: int, fingerprint: str = "x") -> Teacher:
    """A function of logits, which writes nothing."""
    return Teacher(forward, vocabulary, fingerprint, frozenset(), torch.device("cpu"), None, None)  # type: ignore[arg-type]


def features_of(target: Any, **options: Any) -> Features:
    """Of a model of transformers, or what `runtime.load` returned."""
    if isinstance(target, Model):
        return Features(target.engine, Teacher.of(target), **options)
    engine = SimpleNamespace(
        module=target, device=target.device, vocab_size=target.get_input_embeddings().num_embeddings,
        description=type(target).__name__, lockstep=True,
    )  # fmt: skip
    return Features(engine, teacher_of(target), **options)


def acceptance_of(
    draft: Any, target: Any, rows: TextRows | torch.Tensor, length: int = 5, texts: Texts | None = None
) -> dict[str, Any]:
    """`measure_acceptance` of a student or a model, on rows and what the target writes after their first halves (or `texts`)."""
    student = draft if isinstance(draft, Student) else Student(draft)
    teacher = target if isinstance(target, Teacher) else teacher_of(target)
    rows = rows if isinstance(rows, TextRows) else TextRows(rows)
    return measure_acceptance(student, teacher, rows, texts or target_texts(teacher, rows), length)
