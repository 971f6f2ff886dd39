"""Job of a stage `recover`: checks against the model and the stages before it, footprint, and run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.core.processes import launched
from compress.distill.recover import RecoverConfig
from compress.distill.recover.nested import feed_forward
from compress.distill.recover.recovery import Recovery, recover, rows
from compress.distill.recover.teachers import cached_bytes
from compress.distill.train.data import held_out
from compress.distill.train.losses import Objective
from compress.model.check_model import check_fits_model, check_streams
from compress.model.footprint import Footprint, ModelSize, Speed
from compress.model.stage import Job, Store
from compress.recipe import KINDS, Stage
from runtime.config.messages import listing
from runtime.engines.torch.encoder import position_limit
from runtime.errors import RequestError

if TYPE_CHECKING:
    from compress.core.memory_bounds import Bounds
    from compress.core.progress import Reporter
    from compress.model.context import Context
    from compress.model.footprint import Rows
    from compress.model.streamed import StreamedModel


_CHANGING = ("structure", "prune", "quantize")
_POSITION = re.compile(r"(position|wpe)[^.]*$")


@dataclass(frozen=True)
class RecoverJob(Job):
    """A recovery that has been checked.

    Attributes:
        model: that will be trained, in numbers. teacher: the model before all stages.
        after: methods of the stages before that compress layers, which are compressed before the training.
        notes: warnings for the user.
    """

    model: ModelSize
    teacher: ModelSize
    after: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def taught(self) -> bool:
        """Whether the teacher's outputs are needed."""
        return bool(self.stage.config.kl or self.stage.config.squarehead)

    @property
    def needs(self) -> set[str]:
        """It always reads text."""
        return {"text"}

    @property
    def stored(self) -> int:
        """Bytes of the model on the disk."""
        return self.model.stored

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """Of the training, which has rows of text of its own."""
        return recovery_footprint(self, speed, context.streamed.device)

    def describe(self) -> str:
        """For people: "recovery by finetune after sparsegpt, 400 steps of training"."""
        after = f" after {' and '.join(self.after)}" if self.after else ""
        return f"recovery by {self.stage.method}{after}, {self.stage.config.steps:,} steps of training"

    def warnings(self, context: Context, size: int) -> list[str]:
        """Fewer rows than asked for."""
        return list(self.notes)

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Train, all processes together, and write an ordinary checkpoint; see `recover`."""
        before = context.path if store.compressed is None else store.compressed.path
        paths = (context.path, context.original.path, before, store.output, store.work)
        task = {
            "stage": self.stage.index,
            "paths": [str(path.absolute()) for path in paths],
            "passes": context.records,
            "kept_tokens": context.kept_tokens,
        }
        store.ask(self.stage.kind, task)
        found = recover(Recovery(self.stage, before, context, store.output, store.work, reporter, store.team))
        if store.compressed is not None:  # the artifact will say how far its layers are from what was trained: nothing
            names = ("name", "method", "error")
            layers = [layer for layer in store.compressed.layers if layer["error"] is not None]
            found["compressed"] = [{name: layer[name] for name in names} for layer in layers]
            found |= store.compressed.entries
        return found


def prepare(context: Context, stage: Stage) -> RecoverJob:
    """The stage, checked.

    Args:
        context: of what will be trained, or of a model of zeros of its shapes; its `reference` is the teacher.

    Raises:
        RequestError: with file and line, where it cannot be carried out.
    """
    config: RecoverConfig = stage.config
    recipe, streamed = context.recipe, context.streamed
    before = [other for other in recipe.stages if other.index < stage.index]
    layered = [other for other in before if other.phase == "layers"]
    check_fits_model(recipe, streamed)
    check_streams(streamed)

    def refuse(key: str, text: str) -> RequestError:
        return RequestError(recipe.origin.at((*stage.path, key), text))

    if streamed.kind == "encoder":
        for key in ("kl", "cross_entropy"):
            if key in config.model_fields_set and getattr(config, key):
                raise refuse(key, "an encoder says no next token; it learns by squarehead alone")
        if not config.squarehead:
            raise refuse("squarehead", "an encoder learns by squarehead alone, and it is 0")
    changed = any(KINDS[other.kind].changes(other) for other in before)
    if not changed and not config.nested and not config.cross_entropy:
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
    with recipe.origin.located((*stage.path, "temperature")):
        Objective(config.divergence, config.temperature)
    rank = getattr(config, "rank", None)
    if rank is not None and rank > (ours := int(streamed.config.get_text_config().hidden_size)):
        raise refuse("rank", f"a change of rank {rank} is no low-rank one in a model of hidden size {ours}")
    if config.nested:
        if layered:
            text = f"nested widths are trained before layers are compressed, and stage {layered[0].index} is before it"
            raise refuse("method", text)
        with recipe.origin.located((*stage.path, "method")):
            feed_forward(streamed)
    limit = position_limit(streamed.model) if streamed.kind == "encoder" else _positions(streamed)
    if limit is not None and config.sequence_length > limit:
        text = f"rows of {config.sequence_length} tokens are more than the {limit} that a {type(streamed.model).__name__} reads"
        raise refuse("sequence_length", text)
    _, warnings = rows(context, stage)
    after = tuple(other.method for other in layered)
    if streamed.kind == "encoder":
        # The recipe in the artifact says what was done, and can be run again.
        config.kl = config.cross_entropy = 0.0
    return RecoverJob(stage, ModelSize.of(streamed), ModelSize.of(context.reference), after, tuple(warnings))


def _positions(streamed: StreamedModel) -> int | None:
    """Positions that a model has learned a vector for; None: it knows them otherwise. Those of a tower beside it limit no text."""
    found = (
        m.num_embeddings
        for n, m in streamed.model.named_modules()
        if isinstance(m, nn.Embedding) and _POSITION.search(n) and streamed.is_text(n)
    )
    return min(found, default=None)


# ------------------------------------------------------------ footprint
# Bytes of a number that is trained: itself, its gradient and AdamW's moments; and beside them the best so far, with copies of it and its
# moments while a checkpoint is taken. A checkpoint has it, its moments and the best.
_TRAINED, _COPIES, _SAVED = 16, 16, 16
_SHARE = 10  # advice names what takes more than a tenth of the memory


def recovery_footprint(job: RecoverJob, speed: Speed, device: torch.device) -> Footprint:
    """Memory, disk and time of the training, without compressing layers before it.

    Args:
        device: of both models.
    """
    settings, model, teacher = job.stage.config, job.model, job.teacher
    numbers = model.total if settings.adapter is None else _adapted(model, settings.adapter.rank)
    # Beside a weight with an adapter is the sum of both, and what is in between while it is computed and derived by.
    weights = _TRAINED * numbers + (0 if settings.adapter is None else 4 * model.total + 12 * model.inside)
    taught = teacher.stored if job.taught and settings.teacher == "memory" else 0
    activations = _activations(job)
    computed, copies = weights + taught + activations, _COPIES * numbers
    disk = 3 * _SAVED * numbers  # two checkpoints, in case one is damaged, and a third before the first one goes
    if job.taught and settings.teacher == "cached":
        layers = model.blocks if settings.squarehead else 0
        positions = settings.samples * settings.sequence_length
        disk += cached_bytes(positions, teacher.hidden, teacher.itemsize, layers, settings.teacher_top)
    on_cpu = device.type == "cpu"
    return Footprint(
        memory=copies + (computed if on_cpu else 0),
        device=0 if on_cpu else computed,
        disk=disk,
        seconds=_seconds(job, speed, device),
        advice=_advice(job, computed + (copies if on_cpu else 0), taught, activations, weights),
    )


def _adapted(model: ModelSize, rank: int) -> int:
    """Numbers of low-rank changes of all linear layers of the blocks."""
    return sum(min(rank, *sides) * sum(sides) for sides in model.linears)


def _activations(job: RecoverJob) -> int:
    """Bytes of activations: of each layer and position the inputs and outputs of linear layers and norms, at least 17 numbers of the hidden
    size (Korthikanti et al., arXiv 2205.05198); with gradient checkpointing those of one layer, and a hidden state of each."""
    settings, model = job.stage.config, job.model
    positions = _rows_at_once(job) * settings.sequence_length
    layer = max(17 * model.hidden, sum(map(sum, model.linears)) // model.blocks + 4 * model.hidden)
    numbers = layer + model.blocks * model.hidden if settings.gradient_checkpointing else layer * model.blocks
    taught = model.blocks * model.hidden if settings.squarehead else 0
    logits = 0 if model.encoder else 5 * model.vocabulary
    return 4 * positions * (numbers + taught + logits)


def _rows_at_once(job: RecoverJob) -> int:
    """Of one forward pass of a process."""
    own = -(-job.stage.config.batch_size // launched())
    return min(own, job.stage.config.micro_batch or own)


def _advice(job: RecoverJob, total: int, taught: int, activations: int, weights: int) -> str:
    """The settings that would help, those that cost least first."""
    settings = job.stage.config
    large = activations > total // _SHARE
    found = []
    if large and _rows_at_once(job) > 1:
        found.append(f"set micro_batch below {_rows_at_once(job)}")
    if large and not settings.gradient_checkpointing:
        found.append("set gradient_checkpointing: true")
    if taught > total // _SHARE:
        found.append("set teacher: cached")
    if settings.adapter is None and not settings.nested and weights > total // _SHARE:
        found.append("use method lora")
    return ", ".join([*found, "or use a machine with more"] if found else ["use a machine with more"])


def _seconds(job: RecoverJob, speed: Speed, device: torch.device) -> float:
    """An upper bound, since training may end early: two operations a weight and token for a forward pass, four for a backward pass; a
    teacher has forward passes alone. The processes that were launched share them."""
    settings, model = job.stage.config, job.model
    rate = speed.single if device.type == "cpu" and settings.precision != "bfloat16" else max(speed.own, speed.single)
    forward, backward = 2.0 * model.total, 4.0 * model.total
    if settings.gradient_checkpointing:
        backward += 2.0 * model.inside
    lesson = 2.0 * job.teacher.total if job.taught else 0.0
    taught = lesson if settings.teacher == "memory" else 0.0
    trained = settings.steps * settings.batch_size * settings.sequence_length
    looks = settings.steps // settings.evaluate_every + 1
    measured = looks * held_out(settings.samples) * settings.sequence_length
    total = trained * (forward + backward + taught) + measured * (forward + taught)
    total /= launched()
    if settings.teacher == "cached":
        total += settings.samples * settings.sequence_length * lesson
    return total / rate
