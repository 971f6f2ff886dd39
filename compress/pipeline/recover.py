"""The stage `recover` of a run: the model as earlier stages have left it is trained, and written as a plain checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.distill.data import TextRows
from compress.distill.loop import DivergedError
from compress.distill.recovery import held as held_files
from compress.distill.recovery.constraints import between_codes, constrain, settle
from compress.distill.recovery.held import HELD, Held
from compress.distill.recovery.layers import followed
from compress.distill.recovery.learner import Recovering
from compress.distill.recovery.nested import Nested, feed_forward, order
from compress.distill.recovery.teachers import Cached, InMemory, Nobody, RecoveryTeacher, cache_outputs
from compress.distill.rows import digest_of
from compress.distill.team import Team
from compress.distill.train import Trained, check_run
from compress.distill.train import run as run_training
from compress.pipeline.plain import PlainWriter
from compress.pipeline.progress import Reporter
from compress.pipeline.recover_job import RecoverJob, rows, split
from compress.pipeline.session import Session
from compress.pipeline.stream import StreamedModel
from runtime.artifact import Artifact
from runtime.checkpoint import read_json
from runtime.engines.torch import Blueprint
from runtime.linear import CompressedLinear
from runtime.skeleton import find_stacks

_RANKED = 64  # rows of text that channels are ranked by


def recover(
    job: RecoverJob,
    before: Path,
    session: Session,
    passes: Sequence[Mapping[str, Any]],
    output: Path,
    work: Path,
    reporter: Reporter,
    team: Team | None = None,
) -> dict[str, Any]:
    """Train, and write what comes of it to `output`: a plain checkpoint, and what of it is held (`HELD`).

    Args:
        before: the model as it is, a checkpoint or an artifact.
        session: of the same model uncompressed; gives text and how rows are read. Its `reference` is the teacher.
        passes: what earlier stages have done.
        work: for what an interrupted call goes on from.
        team: the processes that share the training; in all but the main one this ends in `PartDone`.

    Returns:
        What happened, JSON-able.
    """
    team, settings, device = team or Team(), job.settings, session.streamed.device
    ids, _ = rows(session, job.stage)
    given, apart = split(ids)
    teacher_of = session.reference
    layers = followed([len(stack.blocks) for stack in teacher_of.stacks], passes) if settings.squarehead else []
    with team.in_turn():
        teacher, judge = _teachers(job, teacher_of, given, apart, layers, work / "teacher", device, reporter)
    model, held = whole(before, device)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point() and settings.adapter is None)
    if job.method.nested and getattr(settings, "order", False):
        order(model, session.streamed, feed_forward(session.streamed), given[:_RANKED])
    for name, own in held.items():
        if own.grid is not None and settings.adapter is None and session.checkpoint.has(f"{name}.weight"):
            weight = model.get_submodule(name).weight
            weight.data = between_codes(weight.data, session.checkpoint.get(f"{name}.weight"), own.grid)
    constrain(model, held, settings.adapter, _targets(model), settings.seed)
    if settings.gradient_checkpointing:
        _checkpoint_activations(model)
    kind = Nested if job.method.nested else Recovering
    learner = kind(model, session.streamed, settings, range(len(layers)))
    trained = _train(learner, given, apart, teacher, judge, job, work, device, reporter, team)
    team.leave()
    if trained.ended == "diverged":
        reporter.warn(
            "recovery: the loss diverged; the best weights before that are kept. A lower learning_rate may do better"
        )
    settle(model)
    write(model, session.streamed, output)
    held_files.save(output / HELD, held)
    return _facts(job, trained, digest_of(ids), passes)


def whole(before: Path, device: torch.device) -> tuple[Any, dict[str, Held]]:
    """A model in memory, float32, its compressed layers dense; and what of them must stay.

    A checkpoint that recovery has written says itself what is held in it.
    """
    model: Any = Blueprint(Artifact(before), device, "reference", None, False).build_module()
    held: dict[str, Held] = held_files.load(before / HELD) if (before / HELD).is_file() else {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, CompressedLinear):
            continue
        weight = module.compressed_weight()
        held[name] = Held.of(weight)
        dense = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
        dense.weight = nn.Parameter(weight.dequantize().float().to(device))
        if module.bias is not None:
            dense.bias = nn.Parameter(module.bias.data.float())
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, dense)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model.float(), held


def write(model: Any, streamed: StreamedModel, output: Path) -> None:
    """The weights of a model in memory as a checkpoint that looks as the one that `streamed` is of."""
    source = streamed.checkpoint
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    count = len(streamed.blocks)
    writer = PlainWriter(output, count + 1)
    for part in range(count + 1):
        names = streamed.block_names(part) if part < count else streamed.outside_names()
        tensors = {
            name: found[name].detach().to(source.dtype(name)) if name in found else source.get(name) for name in names
        }
        writer.write(part, tensors, {})
    writer.finish(source.path, read_json(source.path / "config.json"))


def _train(
    learner: Recovering,
    given: torch.Tensor,
    apart: torch.Tensor,
    teacher: RecoveryTeacher,
    judge: RecoveryTeacher,
    job: RecoverJob,
    work: Path,
    device: torch.device,
    reporter: Reporter,
    team: Team,
) -> Trained:
    options, directory = job.settings.options(), work / "training"
    accelerator = team.accelerator
    if accelerator is None:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=device.type == "cpu")
    check_run(learner, options, accelerator, directory, True)
    trained = run_training(
        learner, TextRows(given), teacher, TextRows(apart), judge, options, directory, True, accelerator, team.device(device), reporter
    )  # fmt: skip
    accelerator.free_memory()  # it holds on to models and optimizers, and another stage may train after this one
    return trained


def _teachers(
    job: RecoverJob,
    streamed: StreamedModel,
    given: torch.Tensor,
    apart: torch.Tensor,
    layers: list[int],
    directory: Path,
    device: torch.device,
    reporter: Reporter,
) -> tuple[RecoveryTeacher, RecoveryTeacher]:
    """Of the rows to train on, and of those that are held out."""
    settings = job.settings
    if not settings.kl and not settings.squarehead:
        nobody = Nobody()
        return nobody, nobody
    if settings.teacher == "memory":
        teacher = InMemory(streamed, layers, device)
        return teacher, teacher
    every = torch.cat([given, apart])
    cached = cache_outputs(
        streamed,
        every,
        layers,
        directory,
        top=settings.teacher_top,
        temperature=settings.temperature,
        progress=reporter,
    )
    return cached, Cached(cached.directory, len(given))


def _checkpoint_activations(model: Any) -> None:
    options = {"use_reentrant": False}  # reentrant ones know no gradient of a block whose input needs none
    if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.20
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _targets(model: Any) -> frozenset[str]:
    """The linear layers of the blocks."""
    inside = {id(module) for _, stack in find_stacks(model) for module in stack.modules()}
    return frozenset(name for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside)


def _facts(job: RecoverJob, trained: Trained, text: str, passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    facts = trained.facts()
    del facts["seconds"]  # the same recipe gives the same bytes
    found = {"recover": job.stage.method, "text": text, **facts}
    for when in ("before", "after"):
        if "cross_entropy" in facts[when]:
            found[f"perplexity_{when}"] = math.exp(min(facts[when]["cross_entropy"], 700))
    return found


__all__ = ["HELD", "DivergedError", "recover", "whole", "write"]
