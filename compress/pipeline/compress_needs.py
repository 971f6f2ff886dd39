"""What compressing the layers of a model takes before it is done, and judging the result: memory, disk and time."""

from __future__ import annotations

import math

import torch

from compress.pipeline.bounds import Bounds
from compress.pipeline.needs import Counted, Needs, Rows, Speed, one_row_at_a_time, tokens
from compress.pipeline.session import Session
from compress.pipeline.work import LayerWork
from compress.pipeline.working_set import WorkingSet

Works = dict[str, LayerWork]


def unsettled(session: Session) -> Works:
    """The work as it is before the recoveries that settle some of it."""
    return {name: LayerWork(work.assignment, work.sparsity) for name, work in session.work.items()}


def reads(works: Works) -> bool:
    """Whether calibration text is needed."""
    return any(work.needs for work in works.values())


class CompressNeeds:
    """What the pass over the blocks takes.

    Args:
        works: the layers' work. evaluation: ids `[n, s]` that the result is judged by; None: it is not.
    """

    def __init__(self, session: Session, works: Works, evaluation: torch.Tensor | None, speed: Speed) -> None:
        self._session, self._works, self._speed = session, works, speed
        self._model = Counted.of(session.streamed)
        # Stages before have cut the model that the result is compared with.
        self._judge = self._model if session.source is None else Counted.of(session.reference)
        self._scored = 0 if evaluation is None else math.prod(session.streamed.rows.positions(evaluation))
        self.set = WorkingSet(session, works, evaluation, self._judge)

    def under(self, bounds: Bounds, rows: Rows) -> Needs:
        """With some bounds kept to; `rows`: batches of calibration text, none where nothing needs them."""
        model = self._model
        # Two models' hidden states are compared position by position, so evaluation holds both.
        judged = model.states([(1, self._scored)]) + self._judge.states([(1, self._scored)])
        return Needs(
            memory=max(self.set.phases(rows, bounds).values()),
            states=max(model.states(rows), judged),
            # What enters two blocks, in case one is damaged, and what enters the next.
            disk=3 * model.states(rows) + self.set.files(bounds),
            spilled=judged,
            seconds=_seconds(self._session, self._works, tokens(rows), self._scored, self._speed),
            advice=self._advice(bounds, rows),
        )

    def _advice(self, bounds: Bounds, rows: Rows) -> str:
        """What would make a run smaller: the batch, if it counts for anything, else only a larger machine."""
        batch, least = (max(self.set.phases(some, bounds).values()) for some in (rows, one_row_at_a_time(rows)))
        if batch - least > batch // 10:
            return "lower calibration.batch_size or sequence_length, or use a machine with more"
        return "its largest block and layer need that much; use a machine with more"


def _seconds(session: Session, works: Works, count: int, scored: int, speed: Speed) -> float:
    """A guess: forward passes, Hessians, column loops, start-up."""
    model, judge = Counted.of(session.streamed), Counted.of(session.reference)
    # Collecting stops early in three of four passes of a sequential block: little more than one full pass, and one to go on.
    total = 2.0 * (model.inside * (2.2 * count + scored) + judge.inside * scored) / speed.own
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
