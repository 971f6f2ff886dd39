"""Stage `rotate`: orthogonal matrices folded into the weights, block by block, with proof that every block computes what it did."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.core.memory_bounds import Bounds
from compress.core.progress import Reporter
from compress.core.tensors import relative
from compress.data.layout import TextRows
from compress.model.checkpoint_writer import config_dict, write_zeros
from compress.model.config_sizes import resized, size_of
from compress.model.context import Context
from compress.model.couplings import Slices, shapes
from compress.model.footprint import Footprint, ModelSize, Rows, Speed
from compress.model.rewrite import Lines, Pass, Rewrite, Tensors
from compress.model.stage import Job, StageRoom, Store
from compress.model.streamed import StreamedModel, run_blocks
from compress.prune.structure.amount import skeleton_of
from compress.prune.structure.hidden_norms import find_norms
from compress.prune.structure.removal import check_finite
from compress.recipe.stages import Stage
from compress.report.elements import section, table
from compress.rotate import METHODS
from compress.rotate.method import RotateConfig
from compress.rotate.rotation import Comparison, HiddenRotation, Rotation, keep_mean, rotate_values, value_turns
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Relative difference of the logits of the checkpoint that was written, by the dtype that its tensors are rounded to.
TOLERANCES = {torch.float32: 1e-3}
ROUNDED = 0.1
PREDICTING = "a layer for multi-token prediction, which reads the hidden state as it was before it was rotated"


@dataclass(frozen=True)
class RotateJob(Job):
    """A rotation that has been checked against its model.

    Attributes:
        config: of the rotated model.
        unties: the head is the embeddings, and becomes a tensor of its own, since the final norm folds into it.
        whole: the model, in numbers.
        slices: sides of tensors that have the hidden state along them; empty: it is not rotated.
        heads: of keys and values.
    """

    config: PretrainedConfig
    whole: ModelSize
    slices: tuple[Slices, ...] = ()
    heads: int = 0
    unties: bool = False

    @property
    def settings(self) -> RotateConfig:
        """The stage's fields."""
        return self.stage.config

    @property
    def stored(self) -> int:
        """See `Job.stored`."""
        return self.whole.stored

    def describe(self) -> str:
        """ "hidden state and values by hadamard"."""
        turned = [word for word, on in (("hidden state", self.settings.hidden), ("values", self.settings.values)) if on]
        return f"{' and '.join(turned)} by {self.stage.method}"

    def outline(self, context: Context, directory: Any) -> Checkpoint:
        """The source, or where its head is untied zeros of the new shapes."""
        streamed = context.streamed
        if not self.unties:
            return context.opened
        source, ties = streamed.checkpoint, streamed.ties
        tensors = {
            name: (shape, source.dtype(ties.get(name, name)))
            for name, shape in shapes(skeleton_of(self.config, streamed)).items()
            if source.has(ties.get(name, name))
        }
        directory.mkdir(parents=True, exist_ok=True)
        write_zeros(directory, source.path, config_dict(source, streamed.config, self.config), tensors)
        return Checkpoint(directory)

    def footprint(self, context: Context, rows: Rows, bounds: Bounds, speed: Speed) -> Footprint:
        """What is in no block, twice, a block and its rotated copy in float32, and the matrix."""
        whole, itemsize = self.whole, self.whole.itemsize
        needed = (itemsize + 8) * whole.outside + (itemsize + 12) * whole.block + 16 * whole.hidden**2
        on_cpu = context.streamed.device.type == "cpu"
        return Footprint(
            memory=needed if on_cpu else 4 * whole.outside, device=0 if on_cpu else needed,
            seconds=2.0 * whole.total * whole.hidden / speed.single,
            advice="its embeddings and its largest block need that much; use a machine with more",
        )  # fmt: skip

    def warnings(self, context: Context, size: int) -> list[str]:
        """A head that grows into a tensor of its own; layers that are left out."""
        found = []
        if self.unties:
            found.append(
                f"the head of a {type(context.streamed.model).__name__} is its embeddings; rotated they differ, and the checkpoint grows "
                "by one of them (hidden: false rotates values alone)"
            )
        names = context.reference.predicting
        if names and self.settings.hidden:
            found.append(
                f"{names[0]} and what else belongs to layers for multi-token prediction ({len(names)} tensors) is left out: they read the "
                "hidden state as it was"
            )
        return found

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Write the rotated checkpoint.

        Returns:
            "rotate" (the method), "hidden" and "values" (blocks whose values were rotated), "untied", and "difference": relative, of
            the logits for a probe.

        Raises:
            RequestError: a block computes something else when it is rotated. CompressError: weights with NaN or Inf.
        """
        streamed, probe = context.streamed, (context.probe, None)
        if self.settings.hidden:
            streamed.checkpoint.dropped |= dict.fromkeys(streamed.predicting, PREDICTING)
        run = Pass(self, streamed, [probe], probe, store.output, store.work, store.spill, reporter)
        with context.recipe.origin.located(self.stage.path):
            found = RotatedCheckpoint(run).write()
        missing = len(streamed.blocks) - found["values"]
        if not self.settings.hidden and not found["values"]:
            text = f"nothing of a {type(streamed.model).__name__} was rotated: no layers were found that make values, and read them, alone"
            raise RequestError(context.recipe.origin.at((*self.stage.path, "values"), text))
        if self.settings.values and missing:
            reporter.warn(
                f"the values of {missing} of {len(streamed.blocks)} layers are not rotated: no layers were found that make them, and read "
                "them, alone"
            )
        ids = probe[0]
        made = [
            StreamedModel(checkpoint, streamed.device, dtype=torch.float32)
            for checkpoint in (Checkpoint(run.output), context.opened)
        ]
        logits = []
        for model in made:
            state = run_blocks(model, [probe], None).get(0)
            with model.outside():
                logits.append(model.outputs(state.to(model.device), ids))
        difference = relative(*logits)
        if not difference <= TOLERANCES.get(streamed.dtype, ROUNDED):
            raise CompressError(
                f"{run.output} computes something else than its source (logits relative {difference:.2e}); this is a bug"
            )
        return {
            "rotate": self.stage.method, "hidden": self.settings.hidden, "untied": self.unties,
            "difference": difference, "parameters_before": _parameters(made[1]), "parameters_after": _parameters(made[0]), **found,
        }  # fmt: skip


class RotatedCheckpoint(Rewrite[RotateJob]):
    """Writes a rotated model block by block."""

    def __init__(self, run: Pass[RotateJob]) -> None:
        super().__init__(run, {"hidden": run.streamed}, [run.probe])
        self._way: tuple[str, str, int] | None = None
        self._hidden: HiddenRotation | None = None
        if not self.job.slices:
            return
        norms = find_norms(self.whole.model, self.job.slices)
        matrix = self._matrix(self.job.whole.hidden, 0)
        if not norms or any(
            norm.centred for norm in norms.values()
        ):  # norms without weights are not seen; some take the mean away
            matrix = keep_mean(matrix)
        self._hidden = HiddenRotation(matrix.float().to(self.whole.device), self.job.slices, norms, self._read)

    def _matrix(self, size: int, salt: int) -> torch.Tensor:
        """Float64 `[size, size]`, the same whenever it is asked for."""
        generator = torch.Generator().manual_seed(self.job.settings.seed + salt)
        return METHODS[self.job.stage.method].matrix(size, generator)

    def _read(self, name: str) -> torch.Tensor | None:
        """A tensor of the whole model, on its device; None where it has none of this name."""
        source = self.whole.checkpoint
        return source.get(name).to(self.whole.device) if source.has(name) else None

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """See `Rewrite.block`."""
        whole, prefix = self.whole, self.whole.block_prefix(index)
        names = whole.block_names(index)
        check_finite({name: whole.checkpoint.get(name) for name in names})
        block = copy.deepcopy(whole.blocks[index]).float()
        state = self.states["hidden"].get(0).to(whole.device).float()
        hidden, matrix = self._hidden, None if self._hidden is None else self._hidden.matrix

        def run(module: nn.Module, rotated: bool) -> torch.Tensor:
            given = state if matrix is None or not rotated else state @ matrix
            return whole.run_block(index, given, self.run.probe, torch.float32, module)

        rotation = Rotation() if hidden is None else hidden.of_block(block, prefix, run)
        way = None
        if self.job.settings.values:

            @lru_cache
            def of_head(width: int) -> torch.Tensor:
                return self._matrix(width, 1).float().to(whole.device)

            ways = value_turns(block, self.job.heads, self.job.whole.hidden, of_head)
            ways.sort(key=lambda way: way.name != self._way)  # as a rule the way of the block before
            compare = lambda consumer: Comparison(block, prefix, run, [consumer], matrix)  # noqa: E731
            rotation, way = rotate_values(block, prefix, rotation, compare, ways)
            self._way = self._way if way is None else way.name
        self.advance(index)
        values = "" if way is None else way.producer
        return (
            self._tensors(rotation, names),
            [{"values": values}],
            f"rotated{f', values of {values}' if values else ''}",
        )

    def outside(self) -> tuple[Tensors, Lines]:
        """See `Rewrite.outside`."""
        whole = self.whole
        names = [name for name in whole.outside_names() if name not in whole.extra]
        rest = self.stored(name for name in whole.outside_names() if name in whole.extra)
        if self._hidden is None:
            return self.stored(names) | rest, []
        check_finite({name: whole.checkpoint.get(name) for name in names})
        final = next((name for name in self._hidden.norms if not whole.is_inside(name)), None)
        untied = [name for name in whole.ties if self.job.unties]
        rotation = self._hidden.outside(whole.model, [*names, *untied], final)
        return self._tensors(rotation, [*names, *untied]) | rest, []

    def finish(self, lines: Lines) -> dict[str, Any]:
        """{"values": number of blocks whose values were rotated}."""
        return {"values": sum(bool(line["values"]) for line in lines)}

    def _tensors(self, rotation: Rotation, names: Iterable[str]) -> Tensors:
        """Rotated tensors in the dtypes that they are stored in."""
        found, source = {}, self.whole.checkpoint
        for name in names:
            stored = source.get(self.whole.ties.get(name, name))
            found[name] = rotation(name, stored.to(self.whole.device)).to(stored.dtype)
        return found


def prepare(context: Context, stage: Stage) -> RotateJob:
    """The stage, checked.

    Raises:
        RequestError: with file and line, where it cannot be carried out.
    """
    streamed, origin = context.streamed, context.recipe.origin
    config, name = streamed.config, type(streamed.model).__name__
    if streamed.kind != "decoder" or type(streamed.rows) is not TextRows:
        raise RequestError(origin.at(stage.path, f"a {name} is not rotated: only decoders of text are"))
    heads = 0
    if stage.config.values:
        with origin.located((*stage.path, "values")):
            heads = size_of(config, "heads").count
            widths = {getattr(module, "head_dim", None) for module in streamed.blocks.modules()}
            _check_sizes(stage, {width for width in widths if isinstance(width, int)}, "heads of {}")
    if not stage.config.hidden:
        return RotateJob(stage, config, ModelSize.of(streamed), heads=heads)
    size = size_of(config, "hidden").count
    with origin.located((*stage.path, "hidden")):
        _check_sizes(stage, {size}, "a hidden state of {}")
        slices = tuple(_slices(streamed, size))
        finals = [norm for norm in find_norms(streamed.model, slices) if not streamed.is_inside(norm)]
        if len(finals) > 1:
            raise RequestError(
                f"{' and '.join(finals)} of a {name} are norms in no layer, of which only the last folds; set hidden: false"
            )
    rotated: Any = copy.deepcopy(config)
    unties = bool(streamed.ties) and bool(finals)
    if unties:
        rotated.tie_word_embeddings = False
    return RotateJob(stage, rotated, ModelSize.of(streamed), slices, heads, unties)


def _check_sizes(stage: Stage, sizes: Iterable[int], what: str) -> None:
    """RequestError where the method has no matrix of a size; `what` says of what, with `{}` for the size."""
    for size in sizes:
        try:
            METHODS[stage.method].matrix(size, torch.Generator().manual_seed(0))
        except ValueError as error:
            raise RequestError(f"{what.format(size)}: {error}") from None


def _slices(streamed: StreamedModel, size: int) -> list[Slices]:
    """Sides of tensors that are as long as the hidden state, and shorter in a model whose hidden state is.

    Raises:
        RequestError: the model has other tensors then.
    """
    heads = (
        getattr(streamed.config.get_text_config(), "num_attention_heads", None) or 1
    )  # some configs want whole heads
    less = max(size // 2 // heads, 1) * heads
    smaller = skeleton_of(resized(streamed.config, "hidden", less), streamed)
    old, new = shapes(streamed.model), shapes(smaller)
    if old.keys() != new.keys():
        raise RequestError(
            f"a {type(streamed.model).__name__} has {min(old.keys() ^ new.keys())} at some sizes of the hidden state alone, so that what "
            "has it cannot be told; set hidden: false"
        )
    return [
        Slices(name, dim, 1)
        for name, shape in old.items()
        for dim, (wide, narrow) in enumerate(zip(shape, new[name], strict=True))
        if wide == size != narrow
    ]


def _parameters(streamed: StreamedModel) -> int:
    """Of a model, tied ones once."""
    named = streamed.model.named_parameters(remove_duplicate=False)
    return sum(value.numel() for name, value in named if name not in streamed.ties)


class Rotate(StageRoom):
    """The stage `rotate`."""

    name = "rotate"
    summary = "rotate the hidden state and values: the same function, fewer outliers"

    def methods(self) -> Mapping[str, Any]:
        """See `compress.rotate`."""
        return METHODS

    def changes(self, stage: Stage) -> bool:
        """The function stays."""
        return False

    def check(self, context: Context, stage: Stage) -> RotateJob:
        """See `prepare`."""
        return prepare(context, stage)

    def row(self, record: Mapping[str, Any]) -> tuple[str, str, str, str]:
        """What was rotated, and by how much the logits moved."""
        before, after = (f"{record[f'parameters_{when}']:,}" for when in ("before", "after"))
        return (
            _what(record),
            before,
            after,
            f"parameters {before} -> {after}, logits moved by {record['difference']:.1e}",
        )

    def report(self, manifest: Mapping[str, Any]) -> str:
        """What was rotated, and what the logits say."""
        passes = [made for made in manifest.get("passes") or [] if "rotate" in made]
        if not passes:
            return ""
        columns = ("rotated", "head", "logits moved by>", "parameters before>", "after>")
        rows = [
            (
                _what(made), "of its own" if made["untied"] else "as before", f"{made['difference']:.1e}",
                f"{made['parameters_before']:,}", f"{made['parameters_after']:,}",
            )
            for made in passes
        ]  # fmt: skip
        return section("What was rotated", table(columns, rows))


def _what(record: Mapping[str, Any]) -> str:
    """ "hidden state and values of 4 layers by hadamard"."""
    parts = ["hidden state"] if record["hidden"] else []
    parts += [f"values of {record['values']} layers"] if record["values"] else []
    return f"{' and '.join(parts) or 'nothing'} by {record['rotate']}"


STAGE = Rotate()
