"""Recovery: the model as earlier stages have left it is trained, and written as an ordinary checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress import data
from compress.core.processes import PartDone, Team
from compress.core.progress import Reporter
from compress.distill.recover.alignment import Alignment
from compress.distill.recover.constraints import between_codes, constrain, settle
from compress.distill.recover.losses import Recovering
from compress.distill.recover.nested import Nested, feed_forward, order
from compress.distill.recover.teachers import Cached, InMemory, cache_outputs
from compress.distill.train.data import TextRows, digest_of, split_rows
from compress.distill.train.loop import Guide, Training
from compress.distill.train.options import TrainOptions
from compress.model.checkpoint_writer import PlainWriter
from compress.model.context import Context
from compress.model.float8_source import open_checkpoint
from compress.model.streamed import StreamedModel
from compress.quantize.weight_constraint import CONSTRAINTS, WeightConstraint, load_constraints, save_constraints
from compress.recipe import Recipe, Stage
from runtime.checkpoint.artifact import Artifact
from runtime.engines.blueprint import Blueprint
from runtime.errors import CompressError
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.experts import Experts, expert_of
from runtime.modeling.skeleton import find_stacks

_RANKED = 64  # rows of text that channels are ranked by


@dataclass(frozen=True)
class Recovery:
    """A run of a stage `recover`.

    Attributes:
        stage: of the recipe.
        before: the model as it is, a checkpoint or an artifact.
        context: of the same model uncompressed; gives text and how rows are read. Its `reference` is the teacher.
        output: for the checkpoint. work: state for resuming an interrupted call.
        reporter: of progress.
        team: the processes that share the training.
    """

    stage: Stage
    before: Path
    context: Context
    output: Path
    work: Path
    reporter: Reporter
    team: Team = field(default_factory=Team)

    @property
    def alignment(self) -> Alignment:
        """What of the teacher is compared."""
        context = self.context
        tokens = context.source_ids(torch.arange(context.vocabulary)) if context.kept_tokens else None
        found = Alignment.of([len(stack.blocks) for stack in context.reference.stacks], context.records, tokens)
        return found if self.stage.config.squarehead else replace(found, layers=())

    @property
    def device(self) -> torch.device:
        """Where one process alone computes."""
        return self.context.streamed.device


def recover(recovery: Recovery) -> dict[str, Any]:
    """Train, and write an ordinary checkpoint with the masks and grids of its layers (`CONSTRAINTS`).

    Returns:
        What happened, JSON-able. All processes but the main one end in `PartDone`.
    """
    if (
        recovery.context.streamed.kind == "encoder"
    ):  # it says no next token; the recipe in the artifact says what was done
        recovery.stage.config.kl = recovery.stage.config.cross_entropy = 0.0
    context, device, team, settings = recovery.context, recovery.device, recovery.team, recovery.stage.config
    ids, _ = rows(context, recovery.stage)
    given, apart = split_rows(ids)
    alignment = recovery.alignment
    with team.in_turn():
        teacher, judge = _teachers(recovery, ids, alignment)
    model, constraints = whole(recovery.before, device)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point() and settings.adapter is None)
    if getattr(settings, "order", False):
        order(model, context.streamed, feed_forward(context.streamed), given[:_RANKED])
    grids = {name: own.grid for name, own in constraints.items() if settings.adapter is None and own.grid is not None}
    for name, grid in grids.items():
        if (original := original_weight(model, context, name)) is not None:
            weight = model.get_submodule(name).weight
            weight.data = between_codes(weight.data, original, grid)
    constrain(model, constraints, settings.adapter, _targets(model), settings.seed)
    if settings.gradient_checkpointing:
        checkpoint_activations(model)
    kind = Nested if settings.nested else Recovering
    training = Training(
        kind(model, context.streamed, settings, range(len(alignment.layers))), TextRows(given), teacher, TextRows(apart), judge,
        TrainOptions.of(settings), recovery.work / "training", team.accelerator, team.device(device), recovery.reporter,
    )  # fmt: skip
    trained = training.run()
    training.accelerator.free_memory()  # it holds on to models and optimizers, and another stage may train after this one
    team.leave()
    if trained.ended == "diverged":
        recovery.reporter.warn(
            "recovery: the loss diverged; the best weights before that are kept. A lower learning_rate may do better"
        )
    elif not trained.best_step:
        recovery.reporter.warn(
            f"recovery: held-out text got no better in {trained.steps:,} steps, so the weights stay as they were. Another learning_rate, "
            "more text or more steps may do better"
        )
    settle(model)
    write(model, context.streamed, recovery.output)
    save_constraints(recovery.output / CONSTRAINTS, constraints)
    facts = trained.facts()
    perplexities = {
        f"perplexity_{when}": math.exp(min(facts[when]["cross_entropy"], 700))
        for when in ("before", "after")
        if "cross_entropy" in facts[when]
    }
    return {
        "recover": recovery.stage.method, "text": digest_of(ids), "divergence": settings.divergence,
        "rows": {"trained": len(given), "held_out": len(apart), "length": int(ids.shape[1])},
        "most_steps": settings.steps, "batch_size": settings.batch_size, **facts, **perplexities,
    }  # fmt: skip


def assist(recipe: Recipe, task: Mapping[str, Any], device: str, team: Team) -> None:
    """Another process's part in a recovery of the main one (`RecoverJob.run`)."""
    checkpoint, original, before, output, work = map(Path, task["paths"])
    known = {"records": task["passes"], "kept_tokens": task["kept_tokens"]}
    context = Context.open(recipe, open_checkpoint(checkpoint), device, open_checkpoint(original), **known)
    stage = next(stage for stage in recipe.stages if stage.index == task["stage"])
    with Reporter(None, quiet=True) as reporter, suppress(PartDone):
        recover(Recovery(stage, before, context, output, work, reporter, team))


def whole(before: Path, device: torch.device) -> tuple[Any, dict[str, WeightConstraint]]:
    """A model in memory, float32, its compressed layers dense, and the masks and grids that these keep."""
    model: Any = Blueprint(Artifact(before), device, "reference", None, False).build_module()
    constraints = load_constraints(before)
    for name, module in list(model.named_modules()):
        if not isinstance(module, CompressedLinear):
            continue
        weight = module.compressed_weight()
        constraints[name] = WeightConstraint.of(weight)
        dense = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        dense.weight = nn.Parameter(weight.dequantize().float().to(device))
        if module.bias is not None:
            dense.bias = nn.Parameter(module.bias.data.float())
        model.set_submodule(name, dense)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.float(), constraints


def original_weight(model: nn.Module, context: Context, name: str) -> torch.Tensor | None:
    """The weight `[out, in]` that layer `name` of a model had before it was compressed; None: the checkpoint has none of that name."""
    checkpoint = context.checkpoint
    if checkpoint.has(f"{name}.weight"):
        return checkpoint.get(f"{name}.weight")
    place = expert_of(model, name)
    if place is None:
        return None
    home, number = place
    layout, projection = model.get_submodule(home).layout, name.rpartition(".")[2]
    whole = f"{home}.{layout.home(projection)}"  # type: ignore[union-attr, operator]
    return layout.part(projection, checkpoint.get(whole)[number]) if checkpoint.has(whole) else None  # type: ignore[union-attr, operator]


def write(model: Any, streamed: StreamedModel, output: Path) -> None:
    """The weights of a model in memory as a checkpoint that looks as the one that `streamed` is of.

    Raises:
        CompressError: the model in memory lacks a tensor of the other one.
    """
    source, places = streamed.checkpoint, set(streamed.model.state_dict())
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    apart = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}

    def value(name: str) -> torch.Tensor:
        """What training has made of a tensor; of those that the model does not know, what they were."""
        home, _, key = name.rpartition(".")
        own = found.get(name)
        if own is None and home in apart:
            own = apart[home].whole(key, lambda layer, leaf: getattr(layer, leaf).detach())
        if own is None and name in places:
            raise CompressError(f"{name} is not in the model that was trained; this is a bug, nothing was written")
        return source.get(name) if own is None else own.detach().to(source.dtype(name))

    count = len(streamed.blocks)
    writer = PlainWriter(output, count + 1, streamed.model)
    for part in range(count + 1):
        names = streamed.block_names(part) if part < count else streamed.outside_names()
        writer.write(part, {name: value(name) for name in names}, {})
    writer.finish(source.path, source.config)


def _teachers(recovery: Recovery, ids: torch.Tensor, alignment: Alignment) -> tuple[Guide | None, Guide | None]:
    """Teacher and judge, of training and held-out rows: the whole model's outputs and hidden states, so far as they can be compared."""
    settings, streamed = recovery.stage.config, recovery.context.reference
    if not settings.kl and not settings.squarehead:
        return None, None
    if settings.teacher == "memory":
        teacher = InMemory(streamed, alignment, recovery.device)
        return teacher, teacher
    place, top, temperature = recovery.work / "teacher", settings.teacher_top, settings.temperature
    cached = cache_outputs(streamed, ids, alignment, place, top, temperature, recovery.reporter)
    return cached, Cached(cached.directory, len(split_rows(ids)[0]))


def checkpoint_activations(model: Any) -> None:
    """Turn on non-reentrant activation checkpointing in a transformers model."""
    options = {"use_reentrant": False}  # reentrant ones know no gradient of a block whose input needs none
    if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.20
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _targets(model: Any) -> frozenset[str]:
    """The linear layers of the blocks."""
    inside = {id(module) for _, stack in find_stacks(model) for module in stack.modules()}
    return frozenset(name for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside)


# ------------------------------------------------------------ the text
def rows(context: Context, stage: Stage) -> tuple[torch.Tensor, list[str]]:
    """The stage's rows of calibration text, int64 `[n, s]`, and warnings.

    Raises:
        RequestError: with file and line, where there are not enough to hold one out.
    """
    with context.recipe.origin.located((*stage.path, "sequence_length")):
        found, warnings = data.load_training(context.recipe, stage, context.tokenizer, context.vocabulary)
    return context.framed(torch.cat([ids for ids, _ in found.batches])), warnings
