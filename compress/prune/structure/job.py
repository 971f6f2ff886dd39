"""Stage `structure`: checked against its model, then carried out, and proof that the smaller checkpoint computes what it should."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.core.memory_bounds import Bounds
from compress.core.progress import Reporter
from compress.core.tensors import relative
from compress.model.check_model import check_streams
from compress.model.checkpoint_writer import PREDICTING, zeros
from compress.model.config_sizes import resized, size_of, with_widths
from compress.model.context import Context
from compress.model.footprint import Footprint, ModelSize, Rows, Speed, tokens
from compress.model.stage import Store
from compress.model.streamed import StreamedModel, run_blocks
from compress.prune.structure import METHODS, StructureConfig
from compress.prune.structure.amount import skeleton_of, units_kept
from compress.prune.structure.channels import ChannelRemoval
from compress.prune.structure.config import Remove
from compress.prune.structure.cut_plan import CutPlan
from compress.prune.structure.experts import ExpertRemoval
from compress.prune.structure.gradients import ROWS
from compress.prune.structure.hidden import HiddenRemoval
from compress.prune.structure.layers import LayerRemoval
from compress.prune.structure.removal import Pass, Removal
from compress.prune.structure.vocabulary import kept_tokens
from compress.prune.structure.vocabulary.removal import TokenRemoval
from compress.prune.structure.width_allocation import MOST
from compress.recipe import Stage
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.config.messages import listing
from runtime.errors import CompressError, RequestError
from runtime.modeling.layer_sizes import KEY, differing

_COLLECTED = frozenset({"hessian", "ranges", "influence", "states", "routing"})  # from blocks, over all rows
# Float64 matrices that there are at once while a layer is fitted: inputs by inputs, and outputs by inputs.
_SQUARES, _SIDES = 5, 5
_PAIRS = 6  # float32 ones where every unit is compared with every other
_ROUNDS = 64  # removals one after the other, unless the recipe says how many go at once
_ROUND = 1.5e-8  # seconds that bringing one number of the moments up to date takes in one of them


def _inputs(job: CutPlan) -> int:
    """Inputs of the widest layer that reads removed units."""
    if job.settings.remove == "hidden":
        return job.whole.widest
    return max((c.columns.each * c.count for block in job.units for c in block), default=0)


def _solved_inputs(job: CutPlan) -> int:
    """Inputs of the widest layer whose second moments are needed; 0: none."""
    fitted = job.settings.remove == "hidden" and job.settings.reconstruct
    return _inputs(job) if fitted or "hessian" in job.needs else 0


def _gradients(job: CutPlan, rows: Rows, length: int, speed: Speed, device: torch.device) -> Footprint:
    """The whole model, float32, and its activations."""
    whole = job.whole
    numbers = 17 * whole.blocks * whole.hidden + 5 * whole.vocabulary
    activations = 4 * ROWS * length * numbers
    seconds = 6.0 * whole.total * tokens(rows) / speed.single
    shorter = "lower calibration.sequence_length, " if activations > 4 * whole.total // 10 else ""
    advice = (
        f"{job.stage.method} has the whole model in memory: {shorter}use a method that has not, or a machine with more"
    )
    needed = 4 * whole.total + activations
    on_cpu = device.type == "cpu"
    return Footprint(memory=needed if on_cpu else 0, device=0 if on_cpu else needed, seconds=seconds, advice=advice)


def _by_block(job: CutPlan, rows: Rows, speed: Speed, device: torch.device) -> Footprint:
    """Hidden states of all rows, where anything is collected; what is in no block; a block, cut, and compared in float32."""
    whole, remove = job.whole, job.settings.remove
    both = remove == "hidden" and job.settings.reconstruct  # the whole model and the smaller one, side by side
    models = 2 if both else 1
    seen = rows if job.needs & _COLLECTED else []
    states, forward = models * whole.states(seen), models * whole.forward(seen)
    outside = whole.itemsize * whole.outside
    if remove == "hidden":
        parts = 2 * outside + 2 * (whole.itemsize + 4) * whole.block
    elif remove == "vocabulary":  # the last part is cut while the whole is there, and then loaded to be compared
        parts = 3 * outside + whole.itemsize * whole.block
    else:
        parts = outside + (3 * whole.itemsize + 8) * whole.block
    inputs = _solved_inputs(job)
    moments = (12 if both else 4) * inputs**2
    solve = 8 * (_SQUARES * inputs**2 + _SIDES * inputs * whole.hidden)  # on the CPU, wherever the model is
    if job.method.pairwise:
        solve = max(solve, 4 * _PAIRS * _inputs(job) ** 2)
    computed = parts + moments + forward
    needs = Footprint(
        memory=computed + solve,
        states=states,
        disk=3 * states,  # what enters two blocks, in case one is damaged, and what enters the next
        seconds=_seconds(job, seen, speed),
        advice=_advice(computed, solve, forward),
    )
    if device.type == "cpu":
        return needs
    return replace(needs, memory=solve + (whole.itemsize + 4) * whole.block, device=computed)


def _advice(computed: int, solve: int, forward: int) -> str:
    if forward > (computed + solve) // 10:
        return "lower calibration.batch_size or sequence_length, or use a machine with more"
    if solve > (computed + solve) // 2:
        return (
            "its widest layer needs that much to be fitted; set reconstruct: false with a method that needs no second moments, or use a "
            "machine with more"
        )
    return "its largest block needs that much; use a machine with more"


def _seconds(job: CutPlan, rows: Rows, speed: Speed) -> float:
    """Passes over the text, sums of second moments, and solving; the text is passed over up to the reader and once more to go on."""
    whole, count, remove = job.whole, tokens(rows), job.settings.remove
    passes = {"layers": 2.0, "experts": 3.0, "hidden": 6.4 if job.settings.reconstruct else 2.0}.get(remove, 2.2)
    total = passes * 2.0 * whole.inside * count / speed.own
    inputs = _solved_inputs(job)
    if not inputs:
        return total
    if remove == "hidden":
        return total + sum(
            6.0 * count * read**2 / speed.single + _solved(read, written, speed) for read, written in whole.linears
        )
    each = 1.0 * count * inputs**2 / speed.single
    if job.settings.reconstruct:
        each += _solved(inputs, whole.hidden, speed)
    if job.settings.allocation == "error":  # all is done once more, before, and fitted at each of some widths
        total *= 2
        each *= 2 + (MOST - 2 if job.settings.reconstruct else 0)
    if "hessian" in job.method.needs:
        at_once = getattr(job.settings, "at_once", None)
        rounds = _ROUNDS if at_once is None else (job.size.count - job.kept) / at_once
        each += 3.0 * inputs**3 / speed.double + _ROUND * rounds * inputs**2
    return total + each * sum(len(channels) for channels in job.units)


def _solved(inputs: int, outputs: int, speed: Speed) -> float:
    """Seconds of one least squares."""
    return 2.0 * (inputs**3 / 3 + 2 * outputs * inputs**2) / speed.double


# What was written, in the model's dtype, against what was computed block by block.
TOLERANCE = 3e-2

REMOVALS: dict[Remove, type[Removal]] = {
    "ffn": ChannelRemoval, "heads": ChannelRemoval, "layers": LayerRemoval, "experts": ExpertRemoval, "hidden": HiddenRemoval,
    "vocabulary": TokenRemoval,
}  # fmt: skip


@dataclass(frozen=True)
class StructureJob(CutPlan):
    """A cut that has been checked against its model."""

    def outline(self, context: Context, directory: Path) -> Checkpoint:
        """The smaller model, of zeros, with a tokenizer that goes with it."""
        zeros(directory, context.streamed, self.config)
        if self.tokens is not None:
            self.tokens.write(directory)
        return Checkpoint(directory)

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """Of the gradients, where the method needs any, and of the pass over the blocks."""
        device, length = context.streamed.device, context.recipe.calibration.sequence_length
        needs = _by_block(self, rows, speed, device)
        gradients = "gradients" in self.needs
        return needs.after(_gradients(self, rows, length, speed, device)) if gradients else needs

    def warnings(self, context: Context, size: int) -> list[str]:
        """Too few tokens for second moments; layers that cannot be cut."""
        found, inputs = list[str](), _solved_inputs(self) if self.needs else 0
        count = context.calibration.tokens if inputs else 0
        if count < inputs:
            text = (
                f"{count:,} tokens of calibration text are few for layers with {inputs:,} inputs, whose second moments stage "
                f"{self.stage.index} ({self.stage.kind}) needs; ask for more rows, or longer ones"
            )
            found.append(context.recipe.calibration.at("samples", text))
        names = context.reference.predicting
        if names and self.slices:
            found.append(
                f"{names[0]} and what else belongs to layers for multi-token prediction ({len(names)} tensors) is left out: it has the "
                "shapes of the model that is cut"
            )
        return found

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Write the smaller checkpoint.

        Returns:
            What was done, JSON-able: "remove", "method", "before" and "after" (units), "parameters_before", "parameters_after", "measured"
            (where time was), and what the removal says.

        Raises:
            RequestError: the model computes something else without these units than with zeros in their place. CompressError: weights or
                inputs with NaN or Inf.
        """
        streamed, probe = context.streamed, (context.probe, None)
        batches = context.batches if self.needs else [probe]
        run = Pass(self, streamed, batches, probe, store.output, store.work, store.spill, reporter)
        _check_begun(run)
        # Which layers an earlier stage would keep was not known when the job was made, nor what lists with an entry for each say.
        job = replace(self, config=self.smaller(streamed.config))
        if job.settings.allocation == "error":
            job = job.of_widths(ChannelRemoval(replace(run, job=job)).widths(), streamed.config)
        if job.slices:
            streamed.checkpoint.dropped |= dict.fromkeys(streamed.predicting, PREDICTING)
        removal = REMOVALS[job.settings.remove](replace(run, job=job))
        found = removal.write()
        shown, expected = removal.expected()
        smaller = StreamedModel(Checkpoint(run.output), streamed.device, dtype=streamed.dtype)
        difference = relative(run_blocks(smaller, [shown], None).get(0), expected)
        if not difference <= TOLERANCE:
            raise CompressError(
                f"{run.output} computes something else than it was made to (relative {difference:.2e}); this is a bug"
            )
        return {
            "remove": job.settings.remove, "method": job.stage.method, "before": job.size.count, "after": job.mean_width,
            "unit": job.size.unit, "parameters_before": streamed.parameter_count,
            "parameters_after": smaller.parameter_count,
            **({"widths": list(job.widths)} if job.widths else {}), **({"measured": job.measured} if job.measured else {}), **found,
        }  # fmt: skip


def prepare(context: Context, stage: Stage) -> StructureJob:
    """The stage, checked.

    Raises:
        RequestError: with file and line, where it cannot be carried out.
    """
    config: StructureConfig = stage.config
    recipe, streamed, path = context.recipe, context.streamed, stage.path
    method, removal = METHODS[stage.method], REMOVALS[config.remove]
    if config.remove not in method.removes:
        able = [name for name, other in METHODS.items() if config.remove in other.removes]
        text = (
            f"{method.name} ranks {listing(sorted(method.removes))}, not {config.remove}; that is for {listing(able)}"
        )
        raise RequestError(recipe.origin.at((*path, "remove"), text))
    with recipe.origin.located((*path, "remove")):
        check_streams(streamed)
        size = size_of(streamed.config, config.remove)
        removal.check(streamed)
    if config.reconstruct and not config.axis.fitted:
        text = f"with remove: {config.remove} there is nothing to fit; leave reconstruct out"
        raise RequestError(recipe.origin.at((*path, "reconstruct"), text))
    kept, measured = units_kept(recipe, stage, size, streamed)
    with recipe.origin.located((*path, "remove")):
        smaller = resized(streamed.config, config.remove, kept)
        job = StructureJob(stage, ModelSize.of(streamed), size, kept, smaller, measured=measured)
        job = removal.complete(job, streamed)
    if config.remove == "vocabulary":
        tokens = kept_tokens(recipe, stage, streamed, context.tokenizer, kept)
        return replace(job, tokens=tokens, config=tokens.config(streamed.config, job.config))
    if config.allocation == "error":
        with recipe.origin.located((*path, "allocation")):
            # What comes after must bear layers that differ, in steps of `multiple`.
            job = replace(job, config=with_widths(streamed.config, _uneven(job)))
            skeleton_of(job.config, streamed)
    if isinstance(config.keep, list):
        with recipe.origin.located((*path, "keep")):
            job = job.of_widths(config.keep, streamed.config)
            skeleton_of(job.config, streamed)
    return job


def _uneven(job: StructureJob) -> list[int]:
    """Widths such as may be found: one layer keeps all, the others about what is left, in uneven multiples."""
    choices, depth = job.choices(), len(job.units)
    left = (job.kept * depth - job.size.count) // max(depth - 1, 1)
    near = [choice for choice in choices if choice <= max(left, choices[0])][-2:]
    return [job.size.count, *(near[layer % len(near)] for layer in range(depth - 1))]


# ---------------------------------------------------------------- the run
def _check_begun(run: Pass) -> None:
    """The model is the one that the job was made for, and a pass that goes on goes on to as many units.

    Times are kept, so that a budget of latency gives the same number again; where they are lost it may not.
    """
    job = run.job
    plan = {"before": job.size.count, "after": job.kept}
    begun = run.once("job.json", lambda: plan)
    configs = (job.config, job.smaller(run.streamed.config))
    # Widths that a stage finds by itself were not known before.
    open_ = {KEY}.union(*map(differing, configs))
    wanted, found = (_told(config, open_) for config in configs)
    if begun != plan or wanted != found:
        why = ", since times were measured anew" if job.measured else ""
        raise CompressError(
            f"this run was begun for another model than that of {job.describe()}{why}; run it again with --overwrite"
        )


def _told(config: Any, without: set[str]) -> dict[str, Any]:
    """A config as a dict, without its path, its lists and the keys `without`."""
    kept = config.to_dict().items()
    left_out = {"_name_or_path", *without}
    return {key: value for key, value in kept if key not in left_out and not isinstance(value, (list, tuple))}
