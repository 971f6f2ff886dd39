"""Stage `rotate`: orthogonal matrices folded into the weights, block by block, with proof that every block computes what it did."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.core.memory_bounds import Bounds
from compress.core.progress import Reporter
from compress.core.tensors import relative
from compress.data.layout import TextRows
from compress.model.checkpoint_writer import PREDICTING, config_dict, write_zeros
from compress.model.config_sizes import resized, size_of
from compress.model.context import Context
from compress.model.couplings import Slices, shapes
from compress.model.footprint import Footprint, ModelSize, Rows, Speed
from compress.model.hidden_states import HiddenStates
from compress.model.rewrite import Lines, Pass, Rewrite, Tensors
from compress.model.source import DerivedCheckpoint
from compress.model.stage import Job, StageRoom, Store
from compress.model.streamed import Batch, StreamedModel, run_blocks
from compress.prune.structure.amount import skeleton_of
from compress.prune.structure.hidden_norms import find_norms
from compress.prune.structure.removal import check_finite
from compress.recipe.stages import Stage
from compress.report.elements import section, table
from compress.rotate import METHODS, seeded, start_matrix
from compress.rotate.method import RotateConfig, Site
from compress.rotate.rotation import (
    TOLERANCE,
    Comparison,
    HiddenRotation,
    Rotation,
    ValuePair,
    rotate_values,
    value_pairs,
)
from compress.rotate.sites import collect_sites, footprint_of_learning, value_site
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Relative difference of the logits beyond which the run warns of what rounding to the checkpoint's dtype costs.
ROUNDED = 0.1
#: Share of zeros among the rotated weights beyond which the run warns that they are lost.
ZEROS = 0.1


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
    def learns(self) -> bool:
        """Whether matrices are learned from calibration text."""
        return METHODS[self.stage.method].learn is not None

    @property
    def needs(self) -> set[str]:
        """See `Job.needs`."""
        return set(METHODS[self.stage.method].needs) if self.learns else set()

    @property
    def stored(self) -> int:
        """See `Job.stored`."""
        return self.whole.stored

    def describe(self) -> str:
        """ "hidden state and values by hadamard"."""
        turned = [word for word, on in (("hidden state", self.settings.hidden), ("values", self.settings.values)) if on]
        return f"{' and '.join(turned)} by {self.stage.method}"

    def outline(self, context: Context, directory: Any) -> Checkpoint:
        """The source, or zeros of the new shapes where the head is untied."""
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
        """Embeddings and head, with their float32 copies; a block with its own; and the matrix, which is made on the CPU."""
        whole, itemsize, matrix = self.whole, self.whole.itemsize, 32 * self.whole.hidden**2
        needed = (itemsize + 16) * whole.outside + (itemsize + 16) * whole.block + 4 * whole.hidden**2
        on_cpu = context.streamed.device.type == "cpu"
        found = Footprint(
            memory=matrix + (needed if on_cpu else 2 * itemsize * whole.outside), device=0 if on_cpu else needed,
            seconds=2.0 * whole.total * whole.hidden / speed.single,
            advice="its embeddings and its largest block need that much; use a machine with more",
        )  # fmt: skip
        if not self.learns:
            return found
        method, hidden = METHODS[self.stage.method], whole.hidden
        heads = max(_head_widths(context.streamed), default=0) * self.settings.values
        cost = method.cost(self.settings, hidden * self.settings.hidden)
        cost += len(context.streamed.blocks) * method.cost(self.settings, heads)
        return found.after(footprint_of_learning(whole, rows, cost, speed, on_cpu))

    def warnings(self, context: Context, size: int) -> list[str]:
        """A head that grows into a tensor of its own; layers that are left out."""
        found = []
        if self.unties:
            found.append(
                f"the head of a {type(context.streamed.model).__name__} is tied to its embeddings; rotation unties it, and the checkpoint "
                "grows by its weights (hidden: false rotates values alone)"
            )
        names = context.reference.predicting
        if names and self.settings.hidden:
            found.append(
                f"{len(names)} tensors of layers for multi-token prediction ({names[0]}, ...) are left out: they expect the hidden state "
                "as it was"
            )
        return found

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Write the rotated checkpoint.

        Returns:
            "rotate" (the method), "hidden", "untied", what `RotatedCheckpoint.finish` says, and "difference": relative, of the logits
            for a probe, after rounding to the checkpoint's dtype.

        Raises:
            RequestError: a part computes something else when it is rotated. CompressError: weights with NaN or Inf, or that become so.
        """
        streamed, probe, origin = context.streamed, (context.probe, None), context.recipe.origin
        job = prepare(
            context, self.stage
        )  # which layers, and how wide, an earlier stage would leave was not known before
        if self.settings.hidden:
            streamed.checkpoint.dropped |= dict.fromkeys(streamed.predicting, PREDICTING)
        batches = context.batches if job.learns else [probe]
        run = Pass(job, streamed, batches, probe, store.output, store.work, store.spill, reporter)
        with origin.located(self.stage.path):
            rotated = RotatedCheckpoint(run)
            found = rotated.write()
            rotated.check_outside()
        missing, blocks = len(streamed.blocks) - found["values"], len(streamed.blocks)
        if self.settings.values and missing:
            reasons = map(METHODS[self.stage.method].why_not, _head_widths(streamed))
            why = next(filter(None, reasons), "no separate value and output projections were found")
            if not self.settings.hidden and missing == blocks:
                text = f"nothing of a {type(streamed.model).__name__} was rotated: {why}"
                raise RequestError(origin.at((*self.stage.path, "values"), text))
            reporter.warn(f"the values of {missing} of {blocks} layers are not rotated: {why}")
        if found["zeros"] > ZEROS:
            reporter.warn(f"{found['zeros']:.0%} of the rotated weights were zero; rotation makes them dense")
        made = [
            StreamedModel(checkpoint, streamed.device, dtype=torch.float32)
            for checkpoint in (Checkpoint(run.output), context.opened)
        ]
        difference = relative(*(_logits(model, probe) for model in made))
        if not difference <= ROUNDED:
            reporter.warn(
                f"rounding to {str(streamed.dtype).removeprefix('torch.')} after the rotation moved the logits by {difference:.0%}; a "
                "float32 checkpoint would lose less"
            )
        return {
            "rotate": self.stage.method, "hidden": self.settings.hidden, "untied": job.unties,
            "difference": difference, "parameters_before": made[1].parameter_count, "parameters_after": made[0].parameter_count, **found,
        }  # fmt: skip


class RotatedCheckpoint(Rewrite[RotateJob]):
    """Writer of a rotated model.

    Attributes:
        matrix: what `start_matrix` takes; None: the hidden state is not rotated.
    """

    def __init__(self, run: Pass[RotateJob]) -> None:
        super().__init__(run, {"hidden": run.streamed}, [*(run.batches if run.job.learns else ()), run.probe])
        self._pair: tuple[str, str, int] | None = None
        self.matrix: dict[str, Any] | None = None
        self._hidden: HiddenRotation | None = None
        if not self.job.slices:
            return
        norms = find_norms(self.whole.model, self.job.slices)
        # Norms without weights are not seen; some take the mean away.
        keeps_mean = not norms or any(norm.centred for norm in norms.values())
        self.matrix = {"size": self.job.whole.hidden, "seed": self.job.settings.seed, "keeps_mean": keeps_mean}
        matrix = start_matrix(self.job.stage.method, self.matrix)
        self._hidden = HiddenRotation(matrix.float().to(self.whole.device), self.job.slices, norms, self._read)
        if self.job.learns:
            matrix = self.run.tensors_once("rotation.safetensors", lambda: {"matrix": self._learned(matrix)})["matrix"]
            self._hidden = replace(self._hidden, matrix=matrix.float().to(self.whole.device))

    def _learned(self, start: torch.Tensor) -> torch.Tensor:
        """The matrix of the hidden state of a method that learns it, float64."""
        assert self._hidden is not None
        sites = collect_sites(self.run, self._hidden)
        self.run.reporter.phase(f"{self.job.stage.kind}: learning the rotation", 1)
        found = self._learn(start, sites)
        self.run.reporter.step("learned")
        return found

    def _learned_of_head(self, index: int, pair: ValuePair) -> torch.Tensor:
        site = value_site(self.whole, index, self.states["hidden"], self.batches[:-1], pair.consumer)
        return self._learn(pair.matrix.double().cpu(), [site]).float().to(pair.matrix.device)

    def _learn(self, start: torch.Tensor, sites: list[Site]) -> torch.Tensor:
        learn = METHODS[self.job.stage.method].learn
        assert learn is not None
        own: list[Site] = []
        with torch.inference_mode(False):  # tensors that were made in it have no part in autograd
            while sites:  # one after the other, so that all are not there twice
                site = sites.pop(0)
                own.append(Site(site.inputs.clone(), site.rows.clone()))
            return learn(start.clone(), own, self.job.settings).contiguous()

    def _of_probe(self) -> torch.Tensor:
        """The hidden state of the probe that enters the current block."""
        return self.states["hidden"].get(len(self.batches) - 1)

    def _read(self, name: str) -> torch.Tensor | None:
        """A tensor of the whole model, on its device; None where it has none of this name."""
        source = self.whole.checkpoint
        return source.get(name).to(self.whole.device) if source.has(name) else None

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """See `Rewrite.block`."""
        job, whole, prefix = self.job, self.whole, self.whole.block_prefix(index)
        names = whole.block_names(index)
        check_finite({name: whole.checkpoint.get(name) for name in names})
        block = copy.deepcopy(whole.blocks[index]).float()
        state = self._of_probe().to(whole.device).float()
        hidden, matrix = self._hidden, None if self._hidden is None else self._hidden.matrix

        def run(module: nn.Module, rotated: bool) -> torch.Tensor:
            given = state if matrix is None or not rotated else state @ matrix
            return whole.run_block(index, given, self.run.probe, torch.float32, module)

        rotation, pair = Rotation() if hidden is None else hidden.of_block(block, prefix, run), None
        if job.settings.values:
            pairs = value_pairs(block, job.heads, job.whole.hidden, self._of_head)
            pairs.sort(key=lambda pair: pair.name != self._pair)  # as a rule that of the block before
            compare = lambda consumer: Comparison(block, prefix, run, [consumer], matrix)  # noqa: E731
            turned, pair = rotate_values(block, prefix, rotation, compare, pairs)
            self._pair = self._pair if pair is None else pair.name
            if pair is not None and job.learns:
                learned = replace(pair, matrix=self._learned_of_head(index, pair))
                turned, pair = rotate_values(block, prefix, rotation, compare, [learned, pair])
                if pair is not learned:
                    self.run.reporter.warn(
                        f"{prefix}{learned.producer}: its learned rotation is not exact; a random one is taken"
                    )
            rotation = turned
        self.advance(index)
        values = "" if pair is None else pair.producer
        weights = [parameter for name, parameter in block.named_parameters() if prefix + name in rotation.sides]
        line = {
            "values": values, "zeros": sum(int((weight == 0).sum()) for weight in weights),
            "rotated": sum(weight.numel() for weight in weights),
        }  # fmt: skip
        return self._tensors(rotation, names), [line], f"rotated, values of {values}" if values else "rotated"

    @lru_cache  # noqa: B019 - it lives as long as the run
    def _of_head(self, width: int) -> torch.Tensor | None:
        """Matrix of the values of a head, float32; None where the method has none of this size."""
        if (method := METHODS[self.job.stage.method]).why_not(width) is not None:
            return None
        return method.matrix(width, seeded(self.job.settings.seed + 1)).float().to(self.whole.device)

    def outside(self) -> tuple[Tensors, Lines]:
        """See `Rewrite.outside`."""
        whole, own = self.whole, self._outside_names()
        check_finite({name: whole.checkpoint.get(name) for name in own if whole.checkpoint.has(name)})
        rest = self.stored(name for name in whole.outside_names() if name in whole.extra)
        return self._tensors(self._outside_rotation(), own) | rest, []

    def _outside_names(self) -> list[str]:
        """Tensors of the model that are in no block, and the head where it is untied."""
        names = [name for name in self.whole.outside_names() if name not in self.whole.extra]
        return list(dict.fromkeys([*names, *(self.whole.ties if self.job.unties else ())]))

    def _outside_rotation(self) -> Rotation:
        if self._hidden is None:
            return Rotation()
        final = next((name for name in self._hidden.norms if not self.whole.is_inside(name)), None)
        return self._hidden.outside_blocks(self.whole.model, self._outside_names(), final)

    @torch.inference_mode()
    def check_outside(self) -> None:
        """Compare what enters the first block, and the logits, with the original's, in float32 before rounding.

        Raises:
            RequestError: they differ.
        """
        if self._hidden is None:
            return
        whole, probe, matrix = self.whole, self.run.probe, self._hidden.matrix
        original = StreamedModel(Checkpoint(whole.checkpoint.path), whole.device, dtype=torch.float32)
        rotated = StreamedModel(Checkpoint(self.run.output), whole.device, dtype=torch.float32)
        rotation = self._outside_rotation()
        rotated.checkpoint = DerivedCheckpoint(
            rotated.checkpoint, lambda name: rotation(name, self._stored(name).float())
        )
        state = self._of_probe().to(whole.device).float()
        entered = HiddenStates(2)
        given = []
        for number, (model, own) in enumerate(((original, state), (rotated, state @ matrix))):
            with model.outside():
                model.prelude([probe] * 2, entered, [number])
                given.append(model.outputs(own, probe[0]))
        pairs = {
            "what enters the first layer": (entered.get(1), entered.get(0).to(matrix) @ matrix),
            "what comes after the last layer": (given[1], given[0]),
        }
        for where, (ours, theirs) in pairs.items():
            difference = relative(ours, theirs)
            if not difference < TOLERANCE:
                raise RequestError(
                    f"{where} of a {type(whole.model).__name__} changes when the hidden state is rotated (relative {difference:.1e}); set "
                    "hidden: false"
                )

    def finish(self, lines: Lines) -> dict[str, Any]:
        """{"values": blocks whose values were rotated, "zeros": share of the rotated weights of blocks, "matrix": see the attribute}."""
        zeros, rotated = (sum(line[name] for line in lines) for name in ("zeros", "rotated"))
        return {
            "values": sum(bool(line["values"]) for line in lines), "zeros": zeros / max(rotated, 1), "matrix": self.matrix
        }  # fmt: skip

    def _stored(self, name: str) -> torch.Tensor:
        """A tensor of the whole model; of the head what it is tied to."""
        source = self.whole.checkpoint
        return source.get(name if source.has(name) else self.whole.ties[name])

    def _tensors(self, rotation: Rotation, names: Iterable[str]) -> Tensors:
        """Rotated tensors in the dtypes that they are stored in; CompressError where one overflows."""
        found = {}
        for name in names:
            stored = self._stored(name)
            found[name] = rotation(name, stored.to(self.whole.device)).to(stored.dtype)
            if stored.is_floating_point() and not bool(torch.isfinite(found[name]).all()):
                raise CompressError(
                    f"{name} overflows {str(stored.dtype).removeprefix('torch.')} once it is rotated; convert the checkpoint to bfloat16"
                )
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
    try:
        heads = size_of(config, "heads").count
    except RequestError:  # it has no heads, and so no values
        heads = 0
    if not stage.config.hidden:
        return RotateJob(stage, config, ModelSize.of(streamed), heads=heads)
    size = size_of(config, "hidden").count
    later = [other for other in context.recipe.stages if other.kind == "recover" and other.index > stage.index]
    if later and METHODS[stage.method].learn is not None:
        text = f"compares hidden states with the original model's, whose rotation by {stage.method} is not kept; rotate by hadamard"
        raise RequestError(origin.at(later[0].path, text))
    with origin.located((*stage.path, "hidden")):
        if reason := METHODS[stage.method].why_not(size):
            raise RequestError(reason)
        slices = tuple(_slices(streamed, size))
        finals = [norm for norm in find_norms(streamed.model, slices) if not streamed.is_inside(norm)]
        if len(finals) > 1:
            raise RequestError(
                f"{' and '.join(finals)} of a {name} are norms outside the layers, of which only the final one can be folded; set "
                "hidden: false"
            )
    rotated: Any = copy.deepcopy(config)
    unties = bool(streamed.ties) and bool(finals)
    if unties:
        rotated.tie_word_embeddings = False
    return RotateJob(stage, rotated, ModelSize.of(streamed), slices, heads, unties)


def _head_widths(streamed: StreamedModel) -> list[int]:
    """Widths of the heads of all layers, ascending."""
    widths = {getattr(module, "head_dim", None) for module in streamed.blocks.modules()}
    return sorted(width for width in widths if isinstance(width, int))


def _slices(streamed: StreamedModel, size: int) -> list[Slices]:
    """Sides of tensors that are as long as the hidden state, and shorter in a model whose hidden state is.

    Raises:
        RequestError: the model has other tensors then.
    """
    # Some configs want whole heads.
    heads = getattr(streamed.config.get_text_config(), "num_attention_heads", None) or 1
    less = max(size // 2 // heads, 1) * heads
    smaller = skeleton_of(resized(streamed.config, "hidden", less), streamed)
    old, new = shapes(streamed.model), shapes(smaller)
    if old.keys() != new.keys():
        raise RequestError(
            f"a {type(streamed.model).__name__} has {min(old.keys() ^ new.keys())} only for some hidden sizes, so which sides of its "
            "tensors are the hidden state cannot be told; set hidden: false"
        )
    return [
        Slices(name, dim, 1)
        for name, shape in old.items()
        for dim, (wide, narrow) in enumerate(zip(shape, new[name], strict=True))
        if wide == size != narrow
    ]


def _logits(model: StreamedModel, probe: Batch) -> torch.Tensor:
    state = run_blocks(model, [probe], None).get(0)
    with model.outside():
        return model.outputs(state.to(model.device), probe[0])


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
