"""The part of a model that is in no block: embeddings, final norm, output head. Copied, unless the recipe names them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compress.pipeline.directory import RunDirectory
from compress.pipeline.hidden import HiddenStates
from compress.pipeline.layer import SolvedLayer, activation_tensors, pack_layer
from compress.pipeline.progress import Reporter
from compress.pipeline.session import Session
from compress.pipeline.shards import shard_name, write_part
from compress.pipeline.stream import Batch
from compress.solver.group import solve_group
from compress.statistics import Statistics, StatisticsCollector
from runtime.errors import CompressError, RequestError
from runtime.skeleton import tied_names


def compress_outside(
    session: Session,
    states: HiddenStates,
    batches: list[Batch],
    shards: int,
    directory: RunDirectory,
    reporter: Reporter,
) -> dict[str, Any]:
    """Solve what the recipe names outside of the blocks, write the last shard, and return its record."""
    streamed = session.streamed
    layers: dict[str, SolvedLayer] = {}
    skipped: dict[str, str] = {}
    for name, work in session.outside_work.items():
        module = streamed.model.get_submodule(name)
        weight = module.weight.data  # type: ignore[union-attr]
        assert isinstance(weight, torch.Tensor)
        if not bool(torch.isfinite(weight).all()):
            if session.recipe.on_nonfinite == "fail":
                raise CompressError(
                    f"{name}: the weight holds NaN or Inf; repair the checkpoint, or set on_nonfinite: skip"
                )
            skipped[name] = f"{name}: the weight holds NaN or Inf"
            continue
        statistics = _head_statistics(session, name, module, states, batches) if work.needs else None
        solved = solve_group(
            [weight.float()],
            statistics,
            work.prune,
            work.quantize,
            work.scheme,
            dtype=streamed.dtype,
            names=[name],
            sparsity=[work.share] if work.prune is not None else None,
        )[0]
        layers[name] = pack_layer(
            name, work, solved, activation_tensors(work.scheme, statistics, streamed.dtype), module
        )
        reporter.detail(f"{name}  error {solved.error:.3e}")
    changed = {}
    if session.untie:
        for tied, source in tied_names(streamed.model).items():
            for name in (tied, source):
                if not session.checkpoint.has(name) and name.rpartition(".")[0] not in layers:
                    changed[name] = streamed.model.get_parameter(name).data.clone()
    return write_part(
        directory.path,
        shard_name(shards, shards),
        session.checkpoint,
        streamed.outside_names(),
        changed,
        layers,
        skipped,
    )


def _head_statistics(
    session: Session, name: str, module: nn.Module, states: HiddenStates, batches: list[Batch]
) -> Statistics:
    if module is not session.streamed.model.get_output_embeddings():
        raise RequestError(
            f"{name} is in no block and is no output head, so calibration does not reach it; use method rtn for it"
        )
    collector = StatisticsCollector(int(module.weight.shape[1]), hessian=True)  # type: ignore[union-attr, index]
    for number, (_, mask) in enumerate(batches[:-1]):  # the last batch is the probe
        collector.add(session.streamed.head_input(states.get(number).to(session.streamed.device)), mask)
    return collector.finish()
