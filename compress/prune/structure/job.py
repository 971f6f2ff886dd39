"""Stage `structure` before anything is computed: its recipe checked against the model, and how much it will remove."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from compress.model.checkpoint_writer import zeros
from compress.model.config_sizes import resized, size_of, with_widths
from compress.model.context import Context
from compress.model.footprint import ModelSize
from compress.model.streamed import StreamedModel
from compress.model.supported import check_streams
from compress.prune.structure import METHODS, StructureConfig
from compress.prune.structure.amount import located, skeleton_of, units_kept
from compress.prune.structure.channels import ChannelRemoval
from compress.prune.structure.config import Remove
from compress.prune.structure.cut_plan import CutPlan
from compress.prune.structure.experts import ExpertRemoval
from compress.prune.structure.hidden import HiddenRemoval
from compress.prune.structure.layers import LayerRemoval
from compress.prune.structure.removal import Removal
from compress.prune.structure.vocabulary import kept_tokens
from compress.prune.structure.vocabulary.removal import TokenRemoval
from compress.recipe import Stage
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.config.messages import listing
from runtime.errors import RequestError

REMOVALS: dict[Remove, type[Removal]] = {
    "ffn": ChannelRemoval, "heads": ChannelRemoval, "layers": LayerRemoval, "experts": ExpertRemoval, "hidden": HiddenRemoval,
    "vocabulary": TokenRemoval,
}  # fmt: skip


def prepare(context: Context, stage: Stage) -> CutPlan:
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
    with located(recipe, (*path, "remove")):
        check_streams(streamed)
        size = size_of(streamed.config, config.remove)
        removal.check(streamed)
    if config.reconstruct and not config.axis.fitted:
        text = f"with remove: {config.remove} there is nothing to fit; leave reconstruct out"
        raise RequestError(recipe.origin.at((*path, "reconstruct"), text))
    kept, measured = units_kept(recipe, stage, size, streamed)
    with located(recipe, (*path, "remove")):
        smaller = resized(streamed.config, config.remove, kept)
        job = CutPlan(stage, ModelSize.of(streamed), size, kept, smaller, measured=measured)
        job = removal.complete(job, streamed)
    if config.remove == "vocabulary":
        return _with_tokens(job, context)
    if config.allocation == "error":
        with located(recipe, (*path, "allocation")):
            # What comes after must bear layers that differ, in steps of `multiple`.
            job = replace(job, config=with_widths(streamed.config, _uneven(job)))
            skeleton_of(job.config, streamed)
    if isinstance(config.keep, list):
        with located(recipe, (*path, "keep")):
            job = job.of_widths(config.keep, streamed.config)
            skeleton_of(job.config, streamed)
    return job


def outline(directory: Path, streamed: StreamedModel, job: CutPlan) -> Checkpoint:
    """A checkpoint of zeros that looks as the result will, with a tokenizer that goes with it: what comes next is checked against it."""
    zeros(directory, streamed, job.config)
    if job.tokens is not None:
        job.tokens.write(directory)
    return Checkpoint(directory)


def _with_tokens(job: CutPlan, context: Context) -> CutPlan:
    """The job with its tokens; RequestError where they cannot be so few, or the tokenizer cannot be cut."""
    tokens = kept_tokens(context.recipe, job.stage, context.streamed, context.tokenizer, job.kept)
    return replace(job, tokens=tokens, config=tokens.config(context.streamed.config, job.config))


def _uneven(job: CutPlan) -> list[int]:
    """Widths such as may be found: one layer keeps all, the others about what is left, in uneven multiples."""
    choices, depth = job.choices(), len(job.units)
    left = (job.kept * depth - job.size.count) // max(depth - 1, 1)
    near = [choice for choice in choices if choice <= max(left, choices[0])][-2:]
    return [job.size.count, *(near[layer % len(near)] for layer in range(depth - 1))]
