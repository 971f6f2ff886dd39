"""What compressing the layers of a model takes before it is done, and judging the result: memory, disk and time."""

from __future__ import annotations

import torch

from compress.pipeline.needs import Counted, Needs, Rows, Speed, one_row_at_a_time, tokens
from compress.pipeline.session import Session
from compress.pipeline.work import LayerWork
from compress.solver import chunks

Works = dict[str, LayerWork]


def unsettled(session: Session) -> Works:
    """The work as it is before the recoveries that settle some of it."""
    return {name: LayerWork(work.assignment, work.sparsity) for name, work in session.work.items()}


def reads(works: Works) -> bool:
    """Whether calibration text is needed."""
    return any(work.needs for work in works.values())


def compress_needs(session: Session, works: Works, rows: Rows, evaluation: torch.Tensor | None, speed: Speed) -> Needs:
    """What the pass over the blocks takes.

    Args:
        works: the layers' work. rows: batches of calibration text; none where nothing needs them.
        evaluation: ids `[n, s]` that the result is judged by; None: it is not.
    """
    model = Counted.of(session.streamed)
    scored = 0 if evaluation is None else int(evaluation.numel())
    # Two models' hidden states are compared position by position, so evaluation holds both.
    judged = model.states([(1, scored)]) + _judge(session, model).states([(1, scored)])
    return Needs(
        memory=_working_set(session, works, rows, evaluation, model),
        states=max(model.states(rows), judged),
        disk=3 * model.states(rows),  # what enters two blocks, in case one is damaged, and what enters the next
        spilled=judged,
        seconds=_seconds(session, works, tokens(rows), scored, speed),
        advice=_advice(session, works, rows, model),
    )


def _judge(session: Session, model: Counted) -> Counted:
    """The model that the result is compared with, which is larger where stages before have cut it."""
    return model if session.source is None else Counted.of(session.reference)


def _advice(session: Session, works: Works, rows: Rows, model: Counted) -> str:
    """What would make a run smaller: the batch, if it counts for anything, else only a larger machine."""
    batch, least = (_working_set(session, works, some, None, model) for some in (rows, one_row_at_a_time(rows)))
    if batch - least > batch // 10:
        return "lower calibration.batch_size or sequence_length, or use a machine with more"
    return "its largest block and layer need that much; use a machine with more"


def _working_set(session: Session, works: Works, rows: Rows, evaluation: torch.Tensor | None, model: Counted) -> int:
    """Bytes beyond what the process holds now: what is outside the blocks, the largest block, and the most one solve takes."""
    checkpoint, streamed = session.checkpoint, session.streamed
    outside = sum(checkpoint.nbytes(n) for n in streamed.outside_names())
    block = max(sum(checkpoint.nbytes(n) for n in streamed.block_names(i)) for i in range(len(streamed.blocks)))
    solve = 0
    together: dict[tuple[str, int], int] = {}
    for name in works:
        weight = streamed.model.get_submodule(name).weight
        key = _reader(name), int(weight.shape[1])  # type: ignore[union-attr, index]
        together[key] = together.get(key, 0) + int(weight.numel())  # type: ignore[union-attr, operator]
    for name, work in works.items():
        weight = streamed.model.get_submodule(name).weight
        out, columns = int(weight.shape[0]), int(weight.shape[1])  # type: ignore[union-attr, index]
        hessians = 2 * 4 * columns * columns if "hessian" in work.needs else 0
        group = together[_reader(name), columns]
        pattern = work.prune.parsed if work.prune is not None else None
        # A chunk is held nine times over in float32 while it is solved; of all weights that share the input there are codes,
        # dequantized and packed weights, and float32 values with their masks where pruning chooses before rounding.
        apart = chunks.rows_are_independent(pattern, work.scheme.weights)
        chunk = min(group, chunks.rows_at_a_time(columns) * columns) if apart else out * columns
        stored = group * (1 + 2 * streamed.dtype.itemsize + (6 if pattern is not None else 0))
        solve = max(solve, hessians + 9 * 4 * chunk + stored)
    logits = 0
    if evaluation is not None:
        from compress.pipeline.streamed_eval import LOGIT_ROWS

        logits = 6 * 4 * max(LOGIT_ROWS, int(evaluation.shape[1])) * session.vocabulary
    judge = _judge(session, model)
    judged = judge.itemsize * (judge.outside + judge.block) + outside + logits + judge.forward([])
    # Solving a block and judging the result happen one after the other.
    return outside + max(2 * block + solve + model.forward(rows), judged)


def _reader(name: str) -> str:
    """Layers of one module and one width are taken to read the same input (q/k/v, gate/up), which is never too little."""
    return name.rpartition(".")[0]


def _seconds(session: Session, works: Works, count: int, scored: int, speed: Speed) -> float:
    """A guess: forward passes, Hessians, column loops, start-up."""
    model = Counted.of(session.streamed)
    # Collecting stops early in three of four passes of a sequential block: little more than one full pass, and one to go on.
    total = 2.0 * (model.inside * (2.2 * count + scored) + _judge(session, model).inside * scored) / speed.own
    for name, work in works.items():
        weight = session.streamed.model.get_submodule(name).weight
        out, columns = int(weight.shape[0]), int(weight.shape[1])  # type: ignore[union-attr, index]
        if "hessian" in work.needs:
            total += 1.0 * count * columns * columns / speed.single
            # The column loop, the error it leaves and what it is measured by; two more for a refinement pass; then the factor.
            times = 3 + 2 * int(getattr(work.quantize, "sweeps", 0) or 0)
            total += (times * out * columns * columns + columns**3 / 3) / speed.single
        total += out * columns * 8e-8
    return 2.0 + total
