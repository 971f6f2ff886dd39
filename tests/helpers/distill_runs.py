"""Small training runs that several tests start, in this process and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from random_models import random_llama
from teachers import teacher_of

from compress.distill.draft.cut import cut
from compress.distill.draft.student import Student
from compress.distill.train.data import TextRows
from compress.distill.train.loop import Trained, Training
from compress.distill.train.losses import Objective
from compress.distill.train.options import TrainOptions

VOCABULARY = 61


def rows(count: int = 16, length: int = 12, seed: int = 0) -> TextRows:
    """Random ids, of which some positions are not trained, more in some rows than in others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (count, length), generator=generator)
    trained = torch.arange(length) < torch.randint(2, length, (count, 1), generator=generator)
    return TextRows(ids, trained)


def target(**changes: Any) -> Any:
    return random_llama(0, vocab_size=VOCABULARY, num_hidden_layers=3, **changes)


def student(model: Any, objective: Objective | None = None, kept: torch.Tensor | None = None) -> Student:
    return Student(cut(model, range(1)), objective, kept)


def run(
    who: Student, model: Any, options: TrainOptions, source: Any = None, teacher: Any = None, **arguments: Any
) -> Trained:
    judge = teacher_of(model, "t")
    source = source or rows()
    teacher = judge if teacher is None else teacher
    return Training(who, source, teacher, rows(5, seed=9), judge, options, **arguments).run()


def weights(who: Student) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in who.draft.named_parameters()}


def two_processes(out: str, options: dict[str, Any]) -> None:
    """What each of several processes runs: the first one writes the weights and the curve."""
    import json

    from accelerate import Accelerator
    from safetensors.torch import save_file

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = target()
    who = student(model)
    found = run(who, model, TrainOptions(**options), accelerator=accelerator, directory=Path(out) / "both")
    if accelerator.is_main_process:
        save_file(weights(who), Path(out) / "weights.safetensors")
        facts = {
            **found.facts(),
            "processes": accelerator.num_processes,
            "kind": str(accelerator.distributed_type.value),
        }
        (Path(out) / "facts.json").write_text(json.dumps(facts))
