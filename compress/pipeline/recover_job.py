"""A stage `recover` before anything is computed: its text read, and held against the model and what comes before."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress import calibration
from compress.distill.losses import Objective
from compress.distill.recovery import METHODS, RecoverConfig, RecoverMethod
from compress.distill.recovery.nested import feed_forward
from compress.distill.team import launched
from compress.nearest import listing
from compress.pipeline.needs import Counted, Needs, Rows, Speed
from compress.pipeline.recover_needs import held_out, recovery_needs
from compress.recipe import Recipe, Stage
from runtime.engines.torch_encoder import position_limit
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from compress.pipeline.session import Session
    from compress.pipeline.stream import StreamedModel

_LAYERED = ("prune", "quantize")
_CHANGING = ("structure", *_LAYERED)
_POSITION = re.compile(r"(position|wpe)[^.]*$")


@dataclass(frozen=True)
class RecoverJob:
    """What will be trained, as far as it is known.

    Attributes:
        stage: of the recipe.
        config: of the model; nothing of it changes.
        whole: what will be trained, in numbers. teacher: what it learns from.
        after: methods of the stages before that compress layers, which are compressed before the training.
        warnings: sentences for the user.
    """

    stage: Stage
    config: PretrainedConfig
    whole: Counted
    teacher: Counted
    after: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, stage: Stage, streamed: StreamedModel, original: StreamedModel) -> RecoverJob:
        """The job of a stage that has been checked. What an encoder cannot learn becomes 0 in the stage, so that the recipe that is kept
        says what was done, and can be run again."""
        if streamed.kind == "encoder":
            stage.config.kl = stage.config.cross_entropy = 0.0
        return cls(stage, streamed.config, Counted.of(streamed), Counted.of(original))

    @property
    def settings(self) -> RecoverConfig:
        found: RecoverConfig = self.stage.config
        return found

    @property
    def method(self) -> RecoverMethod:
        return METHODS[self.stage.method]

    @property
    def needs(self) -> set[str]:
        """It always needs text."""
        return {"text"}

    def warned(self, session: Session) -> tuple[str, ...]:
        """Sentences for the user."""
        return self.warnings

    @property
    def stored(self) -> int:
        """Bytes of the model on the disk."""
        return self.whole.stored

    def takes(self, session: Session, rows: Rows, speed: Speed) -> Needs:
        """Memory, disk and time; it has rows of text of its own."""
        return recovery_needs(self, self.whole, self.teacher, speed, session.streamed.device)

    def describe(self) -> str:
        """For people: "recovery by finetune after sparsegpt, 400 steps of training"."""
        after = f" after {' and '.join(self.after)}" if self.after else ""
        return f"recovery by {self.stage.method}{after}, {self.settings.steps:,} steps of training"


def prepare(recipe: Recipe, stage: Stage, session: Session, original: StreamedModel) -> RecoverJob:
    """The stage, checked.

    Args:
        session: of what will be trained, or of a model of zeros of its shapes. original: the teacher.

    Raises:
        RequestError: with file and line, where it cannot be carried out.
    """
    config: RecoverConfig = stage.config
    path = ("stages", stage.index, stage.kind)
    streamed = session.streamed

    def refuse(key: str, text: str) -> RequestError:
        return RequestError(recipe.origin.at((*path, key), text))

    if streamed.kind == "encoder":
        for key in ("kl", "cross_entropy"):
            if key in config.model_fields_set and getattr(config, key):
                raise refuse(key, "an encoder says no next token; it learns by squarehead alone")
        if not config.squarehead:
            raise refuse("squarehead", "an encoder learns by squarehead alone, and it is 0")
    changed = any(_changes(other) and other.index < stage.index for other in recipe.stages)
    if not changed and not METHODS[stage.method].nested and not config.cross_entropy:
        text = "no stage before it changes what the model says of its tokens, so there is nothing to teach; put it after one that does"
        raise refuse("method", f"{text} ({listing(_CHANGING)}), or set cross_entropy: 1 to learn from the text itself")
    if config.batch_size % launched():
        text = f"a batch of {config.batch_size} rows cannot be shared by {launched()} processes; make it a multiple"
        raise refuse("batch_size", text)
    if config.adapter is not None and not any(isinstance(m, nn.Linear) for m in streamed.blocks.modules()):
        raise refuse(
            "method",
            f"a {type(streamed.model).__name__} has no linear layers that {stage.method} could change; use finetune",
        )
    try:
        Objective(config.divergence, config.temperature)
    except RequestError as error:
        raise refuse("temperature", str(error)) from None
    rank = getattr(config, "rank", None)
    if rank is not None and rank > (ours := int(streamed.config.get_text_config().hidden_size)):
        raise refuse("rank", f"a change of rank {rank} is no low-rank one in a model of hidden size {ours}")
    if METHODS[stage.method].nested:
        layered = next((s for s in recipe.stages if s.kind in _LAYERED and s.index < stage.index), None)
        if layered is not None:
            raise refuse(
                "method",
                f"nested widths are trained before layers are compressed, and stage {layered.index} is before it",
            )
        try:
            feed_forward(streamed)
        except RequestError as error:
            raise refuse("method", str(error)) from None
    if not recipe.calibration.packing:
        raise RequestError(recipe.calibration.at("packing", "recovery is trained on full rows; set packing: true"))
    limit = position_limit(streamed.model) if streamed.kind == "encoder" else _positions(streamed)
    if limit is not None and config.sequence_length > limit:
        text = f"rows of {config.sequence_length} tokens are more than the {limit} that a {type(streamed.model).__name__} reads"
        raise refuse("sequence_length", text)
    _, warning = rows(session, stage)
    after = tuple(s.method for s in recipe.stages if s.kind in _LAYERED and s.index < stage.index)
    warnings = () if warning is None else (warning,)
    return replace(RecoverJob.of(stage, streamed, original), after=after, warnings=warnings)


def _changes(stage: Stage) -> bool:
    """Whether a stage leaves a model that says something else than before; one with fewer tokens says of those what it said."""
    return stage.kind in _CHANGING and not (stage.kind == "structure" and stage.config.remove == "vocabulary")


def rows(session: Session, stage: Stage) -> tuple[torch.Tensor, str | None]:
    """The stage's rows of calibration text, int64 `[n, s]`, and a warning where they are fewer than asked for.

    Raises:
        RequestError: there are not enough to hold one out.
    """
    config: RecoverConfig = stage.config
    text = _rows_config(session.recipe, config)
    try:
        data = calibration.load(text, session.tokenizer, session.vocabulary)
    except RequestError as error:
        place = session.recipe.origin.at(("stages", stage.index, stage.kind, "sequence_length"), str(error))
        raise RequestError(place) from None
    if data.rows < 2:
        raise RequestError(
            text.at(
                "data",
                f"recovery needs two rows of {config.sequence_length} tokens, one of them to be held out, and the text has one",
            )
        )
    warning = None
    if data.rows < config.samples:
        told = f"the text has only {data.rows} rows of {config.sequence_length} tokens; {config.samples} were asked for"
        warning = session.recipe.origin.at(("stages", stage.index, stage.kind, "samples"), told)
    return session.framed(torch.cat([ids for ids, _ in data.batches])), warning


def _positions(streamed: StreamedModel) -> int | None:
    """Positions that a model has learned a vector for; None: it knows them otherwise. Those of a tower beside it limit no text."""
    found = (
        m.num_embeddings
        for n, m in streamed.model.named_modules()
        if isinstance(m, nn.Embedding) and _POSITION.search(n) and streamed.is_text(n)
    )
    return min(found, default=None)


def split(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows to train on, and rows that are held out."""
    count = held_out(len(ids))
    return ids[:-count], ids[-count:]


def _rows_config(recipe: Recipe, config: RecoverConfig) -> Any:
    return recipe.calibration.model_copy(update={"samples": config.samples, "sequence_length": config.sequence_length})
