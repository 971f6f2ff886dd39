"""The stage `structure` of a run: a smaller checkpoint out of a whole one, and proof that it computes what it should."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.core.files import intact, seal, write_json
from compress.core.tensors import relative
from compress.model.checkpoint_writer import PREDICTING
from compress.model.streamed import StreamedModel, run_blocks
from compress.prune.structure.channels import ChannelRemoval
from compress.prune.structure.cut_plan import CutPlan
from compress.prune.structure.job import REMOVALS
from compress.prune.structure.removal import Pass
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError
from runtime.modeling.layer_sizes import KEY, differing

# What was written, in the model's dtype, against what was computed block by block.
TOLERANCE = 3e-2


def remove_structure(run: Pass) -> dict[str, Any]:
    """Write the smaller model.

    Returns:
        What was done, JSON-able: "remove", "method", "before" and "after" (units), "parameters_before", "parameters_after", "measured"
        (where time was), and what the removal says.

    Raises:
        RequestError: the model computes something else without these units than with zeros in their place. CompressError: weights or
            inputs with NaN or Inf.
    """
    job, streamed = run.job, run.streamed
    _check_begun(job, streamed, run.work)
    # Which layers an earlier stage would keep was not known when the job was made, nor what lists with an entry for each say.
    job = replace(job, config=job.smaller(streamed.config))
    if job.settings.allocation == "error":
        job = job.of_widths(ChannelRemoval(replace(run, job=job)).widths(), streamed.config)
    run = replace(run, job=job)
    if job.settings.remove != "layers":
        streamed.checkpoint.dropped |= dict.fromkeys(streamed.predicting, PREDICTING)
    removal = REMOVALS[job.settings.remove](run)
    found = removal.write()
    probe, expected = removal.expected()
    smaller = StreamedModel(Checkpoint(run.output), streamed.device, dtype=streamed.dtype)
    check_equal(run.output, run_blocks(smaller, [probe], None).get(0), expected)
    return {
        "remove": job.settings.remove, "method": job.stage.method, "before": job.size.count, "after": job.mean_width, "unit": job.size.unit,
        "parameters_before": _parameters(streamed), "parameters_after": _parameters(smaller),
        **({"widths": list(job.widths)} if job.widths else {}), **({"measured": job.measured} if job.measured else {}), **found,
    }  # fmt: skip


def _check_begun(job: CutPlan, streamed: StreamedModel, work: Path) -> None:
    """The model is the one that the job was made for, and a pass that goes on goes on to as many units.

    Times are kept, so that a budget of latency gives the same number again; where they are lost it may not.
    """
    file = work / "job.json"
    plan = {"before": job.size.count, "after": job.kept}
    begun = json.loads(file.read_text(encoding="utf-8")) if intact(file) else plan
    configs = (job.config, job.smaller(streamed.config))
    # Widths that a stage finds by itself were not known before.
    open_ = {KEY}.union(*map(differing, configs))
    wanted, found = (_told(config, open_) for config in configs)
    if begun != plan or wanted != found:
        why = ", since times were measured anew" if job.measured else ""
        raise CompressError(
            f"this run was begun for another model than that of {job.describe()}{why}; run it again with --overwrite"
        )
    work.mkdir(parents=True, exist_ok=True)
    write_json(file, plan)
    seal(file)


def _told(config: Any, without: set[str]) -> dict[str, Any]:
    """A config without where it was read, without its lists, and without what may differ."""
    kept = config.to_dict().items()
    left_out = {"_name_or_path", *without}
    return {key: value for key, value in kept if key not in left_out and not isinstance(value, (list, tuple))}


def _parameters(streamed: StreamedModel) -> int:
    """Of a model, tied ones once: those that are read become tensors of their own."""
    named = streamed.model.named_parameters(remove_duplicate=False)
    return sum(value.numel() for name, value in named if name not in streamed.ties)


def check_equal(path: Path, found: torch.Tensor, expected: torch.Tensor) -> None:
    """CompressError where a checkpoint computes something else than it should."""
    difference = relative(found, expected)
    if not difference <= TOLERANCE:
        raise CompressError(
            f"{path} computes something else than it was made to (relative {difference:.2e}); this is a bug"
        )
