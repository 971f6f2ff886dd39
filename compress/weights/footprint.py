"""Footprint of compressing a model's layers, from shapes: peak memory of each phase beside the process, disk and time.

One phase after the other: what comes before the first block; the blocks, each solved and written; what is in no block; the artifact read
back; the two models run over held-out text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

from compress.core.memory_bounds import Bounds
from compress.core.statistics import BLOCK, ELEMENTS, SAMPLES
from compress.evaluate.streamed import LOGIT_ROWS
from compress.model.expert_calibration import AT_ONCE
from compress.model.footprint import WHOLE_BYTES, Footprint, ModelSize, Rows, Speed, one_row_at_a_time, tokens
from compress.model.output_hessians import states_per_token
from compress.quantize.transforms.flatquant import ROWS
from compress.weights.layer_task import LayerTask
from compress.weights.plan import WeightPlan
from compress.weights.sensitivity import MEASURED_TOKENS
from compress.weights.solver import columns as chunks
from compress.weights.solver import factor
from runtime import formats
from runtime.formats.scheme import Scheme
from runtime.modeling.experts import expert_of
from runtime.modeling.linear_modules import get_matrix

#: Float32 matrices as large as the chunk of a column loop that are there at its peak; and of rounding to nearest, whose is smaller.
LOOP, NEAREST = 9, 6
#: What gradients go back through in a block, beside what a pass over it takes.
BACKWARD = 4
#: Float32 matrices of `ROWS` rows that learning an input transform takes, with their gradients.
LEARNED = 16
#: Panels of a matrix in a file that are in memory at once: of the factor, those it looks back at, and copies.
FACTORED = 5


@dataclass(frozen=True)
class _Layer:
    """A layer's task and sizes. `packed`: bytes on the disk. `reader`: its module. `home`: its module of experts, or "".
    `moments`: matrices of second moments of its inputs that are collected."""

    task: LayerTask
    rows: int
    columns: int
    packed: int
    reader: str
    home: str
    moments: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


class WeightsFootprint:
    """Footprint of a pass over the blocks, and of load-back and evaluation after it.

    Args:
        judged: whether the recipe's evaluation of the artifact on held-out text counts.
    """

    def __init__(self, plan: WeightPlan, judged: bool = True) -> None:
        context, streamed = plan.context, plan.context.streamed
        self._plan = plan
        self._recipe, self._streamed = context.recipe, streamed
        self._model = ModelSize.of(streamed)
        # Stages before have cut the model that the result is compared with.
        self._judge = self._model if context.source is None else ModelSize.of(context.reference)
        self._item = streamed.dtype.itemsize
        windows = context.windows if judged else None
        self._windows = None if windows is None else streamed.rows.positions(windows)
        self._layers = {name: _layer(plan, name, task) for name, task in plan.tasks.items()}
        self._blocks = [
            [layer for name, layer in self._layers.items() if name.startswith(streamed.block_prefix(index))]
            for index in range(len(streamed.blocks))
        ]
        self._sizes = [sum(p.numel() for p in block.parameters()) * self._item for block in streamed.blocks]
        names = streamed.outside_names()
        #: Models whose hidden states go through the blocks: the original one too, where layers make up for errors before them.
        self._streams = 2 if "drift" in plan.needs else 1
        self._outside = sum(context.checkpoint.held_bytes(n) for n in names)
        self._head = sum(context.checkpoint.held_bytes(n) for n in names if streamed.is_head(n))

    def under(self, bounds: Bounds, rows: Rows, speed: Speed) -> Footprint:
        """Under some bounds; `rows`: shapes of the batches of calibration text, none where nothing needs them."""
        model, scored = self._model, 0 if self._windows is None else math.prod(self._windows)
        # Two models' hidden states are compared position by position, so evaluation holds both.
        judged = model.states([(1, scored)]) + self._judge.states([(1, scored)])
        phases = self.phases(rows, bounds)
        # As large are the outputs of a block's attention, which passes over the text for later layers take from memory.
        again = self._recipe.true_sequential and any(layer.task.compensates for layer in self._layers.values())
        states = self._streams * model.states(rows)
        back = states_per_token(len(self._blocks)) * model.states(rows) if self._output_aware else 0
        moments = sum(map(self._output_moments, self._output_aware))
        return Footprint(
            memory=max(phases.values()),
            states=max((2 if again else 1) * states, judged, back, model.states(rows) + self._measured(rows)),
            # What enters two blocks, in case one is damaged, and what enters the next.
            disk=max(3 * states, model.states(rows) + self._measured(rows)) + self._files(bounds) + moments,
            spilled=max(judged, back),
            seconds=self._seconds(tokens(rows), scored, speed),
            advice=self._advice(bounds, rows),
            parts=phases,
        )

    @property
    def widths(self) -> list[int]:
        """Inputs of the layers whose second moments are collected."""
        found = {layer.columns for layer in self._layers.values() if layer.moments}
        return sorted(found | {layer.rows for layer in self._output_aware})

    def phases(self, rows: Rows, bounds: Bounds) -> dict[str, int]:
        """By name.

        Args:
            rows: shapes of the batches of calibration text.
        """
        front, block = self._outside - self._head, max(self._sizes, default=0)
        outside = [layer for name, layer in self._layers.items() if not self._streamed.is_inside(name)]
        forward = self._model.forward(rows)
        base, blocks = self._outside if outside else 0, zip(self._sizes, self._blocks, strict=True)
        found = {
            "first block": max(base, front) + next(iter(self._sizes), 0) + forward,
            "blocks": base + max((self._block(*block, rows, bounds, forward) for block in blocks), default=0),
            "outside": self._outside_phase(outside, rows, bounds),
            "load back": front + self._read_back() + self._whole(),
        }
        if self._output_aware:
            found["output Hessians"] = self._backward(rows, bounds, forward)
        if self._plan.budget is not None:
            found["allocation"] = self._allocation(rows, bounds, forward)
        if self._windows is not None:
            found["evaluation"] = self._judged(front, block)
        return found

    # ------------------------------------------------------------ the pass back
    @property
    def _output_aware(self) -> list[_Layer]:
        """Layers whose output Hessians are collected."""
        return [layer for block in self._blocks for layer in block if layer.task.output_aware and not layer.home]

    def _output_moments(self, layer: _Layer, bounds: Bounds | None = None) -> int:
        """Bytes of an output Hessian; with `bounds` of what is in memory while it is collected."""
        filed = bounds is not None and bounds.filed(layer.rows)
        return 4 * layer.rows * (min(layer.rows, 2 * BLOCK) if filed else layer.rows)

    def _backward(self, rows: Rows, bounds: Bounds, forward: int) -> int:
        """The head, row by row; or a block, the gradients in it, and the output Hessians of its layers."""
        logits = 4 * 4 * max((shape[1] for shape in rows), default=0) * self._plan.context.vocabulary
        aware = self._output_aware
        most = 0
        for size, layers in zip(self._sizes, self._blocks, strict=True):
            own = [layer for layer in layers if layer in aware]
            most = max(most, size + self._widened(size) + sum(self._output_moments(layer, bounds) for layer in own))
        return max(self._outside + self._widened(self._head) + logits, most + (1 + BACKWARD) * forward)

    def _widened(self, size: int) -> int:
        """Float32 copies of weights of `size` bytes, which gradients need until they are through; none where the CPU has the dtype."""
        return 4 * size // self._item if self._model.widened else 0

    # ------------------------------------------------------------ a budget
    def _units(self) -> int:
        """Layers that get one scheme, as one: those of one input, and all experts of a module."""
        layers = ((name, layer) for name, layer in self._layers.items() if layer.task.candidates)
        return len({layer.home or (layer.reader, layer.columns) for _, layer in layers})

    def _measured(self, rows: Rows) -> int:
        """Bytes of the hidden states by which the units are measured, at two candidates each."""
        count, measured = 0, list[tuple[int, ...]]()
        for batch in rows:
            if count < MEASURED_TOKENS:
                measured.append(batch)
                count += math.prod(batch)
        return 2 * self._units() * self._model.states(measured)

    def _allocation(self, rows: Rows, bounds: Bounds, forward: int) -> int:
        """A block, solved as later, beside the weights of one unit as they were and at two candidates; then the head."""
        blocks = zip(self._sizes, self._blocks, strict=True)
        solved = max(self._block(size, layers, rows, bounds, forward) + 3 * size for size, layers in blocks)
        longest = max((batch[1] for batch in rows), default=1)
        logits = 6 * 4 * max(LOGIT_ROWS, longest) * self._plan.context.vocabulary
        return max(solved, self._outside + (0 if self._model.encoder else self._model.wide_copy + logits))

    # ------------------------------------------------------------ blocks
    def _block(self, size: int, layers: list[_Layer], rows: Rows, bounds: Bounds, forward: int) -> int:
        """One block of `size` bytes, its results, and what is in memory at once to make them."""
        kept = sum(layer.packed for layer in layers)
        # Layers with transformed or quantized inputs give way to modules of their own; the originals come back afterwards.
        schemes = ((layer, layer.task.scheme) for layer in layers)
        kept += sum(x.numel * self._item for x, s in schemes if s.activations is not None or s.transform is not None)
        transformed = any(layer.task.transform is not None for layer in layers)
        sequential = self._recipe.true_sequential
        groups = [list(group) for _, group in groupby(sorted(layers, key=_input), key=_input)]
        late = [g for g in groups if sequential and any(layer.task.compensates for layer in g)]
        early = [g for g in groups if g not in late or any(layer.task.transform is not None for layer in g)]
        waiting = sum(self._moments(group, bounds) for group in early)
        most = forward + waiting
        if transformed:  # float32 copies of all weights, after the whole block was float32
            wide = self._streams * 4 * size // self._item
            most = max(most, waiting + wide + max(2 * 4 * sum(x.numel for x in g) for g in groups))
            waiting += 4 * size // self._item
        for group in groups:
            own = self._wave(group, late, bounds) if group in late else 0
            collected = own + forward + self._inputs(group, rows) if own or group in early else 0
            most = max(most, waiting + max(collected, own + self._solve(group, bounds)))
        return self._streams * size + kept + most

    def _moments(self, group: list[_Layer], bounds: Bounds) -> int:
        """Second moments of the input of a group, where they are collected."""
        columns, matrices, filed = (
            group[0].columns,
            max(layer.moments for layer in group),
            bounds.filed(group[0].columns),
        )
        # Of what the layer adds to, where it is alone: taken to be so.
        rows = max((layer.rows for layer in group if layer.task.propagated and not layer.home), default=0)
        panels = [min(side, 2 * BLOCK) if filed else side for side in (columns, rows)]
        samples = SAMPLES if any("samples" in layer.task.needs for layer in group) else 0
        return 4 * columns * (matrices * panels[0] + panels[1] + samples)

    def _wave(self, group: list[_Layer], late: list[list[_Layer]], bounds: Bounds) -> int:
        """Second moments collected together with a group's: those of experts, up to a bound."""
        own = self._moments(group, bounds)
        if not group[0].home or not own:
            return own
        alike = sum(1 for other in late if other[0].home == group[0].home and other[0].columns == group[0].columns)
        return min(alike * own, max(own, AT_ONCE))

    def _inputs(self, group: list[_Layer], rows: Rows) -> int:
        """Inputs in float32, and as much again for what is reduced of them; those of the original model, first as they are."""
        batch = max((shape[0] * shape[1] for shape in rows), default=0)
        before = batch * group[0].columns * self._item if self._streams > 1 else 0
        return self._streams * 2 * 4 * min(batch * group[0].columns, max(ELEMENTS, group[0].columns)) + before

    def _solve(self, group: list[_Layer], bounds: Bounds) -> int:
        """Solving and packing the layers that share an input, beside its second moments."""
        columns, numel = group[0].columns, sum(layer.numel for layer in group)
        largest = max(layer.numel for layer in group)
        solved = pack = 0
        for layer in group:
            task, pattern = layer.task, None if layer.task.prune is None else layer.task.prune.parsed
            apart = chunks.rows_are_independent(pattern, task.scheme.weights)
            chunk = min(numel if task.compensates else layer.numel, chunks.rows_at_a_time(columns) * columns)
            if task.compensates:
                panels = 4 * columns * min(columns, factor.PANEL)
                # Two of the panels are of the factor, of which only the upper half is touched.
                needed = FACTORED * panels
                if not bounds.filed(columns):
                    needed += max(0, 2 * columns * (columns + factor.PANEL) - 2 * panels)
                needed += LOOP * 4 * (chunk if apart else layer.numel)
            else:
                needed = NEAREST * 4 * min(layer.numel, chunks.nearest_rows(columns) * columns)
                weights = task.scheme.weights
                if weights is not None and not weights.rows_apart:
                    needed += 2 * 4 * layer.numel
            if pattern is not None and not task.pruned:  # masks, and values fitted to them, or scores and their order
                needed += 6 * numel if task.compensates else numel + 20 * layer.numel
            solved = max(solved, needed)
            pack = max(pack, layer.packed + 2 * self._item * layer.numel + layer.numel)
        if any(layer.task.propagated for layer in group):  # float32 weights that make up for the drift
            solved += 4 * numel
        turned = [layer for layer in group if layer.task.scheme.transform is not None]
        if turned:  # weights and second moments in another basis, or what it is learned with
            moments = 2 * min(columns, 2 * BLOCK) if bounds.filed(columns) else 2 * columns
            learned = LEARNED * ROWS if any("samples" in layer.task.needs for layer in turned) else 0
            solved += 4 * sum(layer.numel for layer in turned) + 4 * columns * max(moments, learned)
        # Output Hessians, their factors, weights in another order, and their errors.
        if any(layer.task.output_aware for layer in group):
            solved += sum(2 * self._output_moments(layer) for layer in group) + 2 * 4 * numel
        codes = numel * (1 if group[0].task.scheme.weights is not None else self._item)
        return codes + max(solved, pack, 2 * self._item * largest)

    def _files(self, bounds: Bounds) -> int:
        """Bytes of second moments and factors in files, at the most."""
        filed = [layer for layer in self._layers.values() if layer.moments and bounds.filed(layer.columns)]
        early = (layer for layer in filed if not layer.task.compensates or layer.task.transform)
        inputs = {(layer.reader, layer.columns) for layer in early}
        waiting = self._streams * sum(4 * columns**2 for _, columns in inputs) // max(1, len(self._blocks))
        largest = max((4 * layer.columns**2 for layer in filed), default=0)
        sums = max((4 * layer.rows * layer.columns for layer in filed if layer.task.propagated), default=0)
        return waiting + sums + max((1 + self._streams) * largest, AT_ONCE if any(layer.home for layer in filed) else 0)

    # ------------------------------------------------------------ before and after
    def _outside_phase(self, layers: list[_Layer], rows: Rows, bounds: Bounds) -> int:
        """The tensors outside of the blocks are read again to be written, beside the solved layers."""
        if not layers:
            return self._outside
        made = sum(layer.packed + layer.numel * self._item for layer in layers)
        alone = [[layer] for layer in layers]
        solve = max(max(self._moments(g, bounds) + self._solve(g, bounds), self._inputs(g, rows)) for g in alone)
        return self._outside + made + max(solve, self._outside)

    def _read_back(self) -> int:
        """A block of the artifact: as it is stored, dense, and the layer that is unpacked."""
        most = 0
        for size, layers in zip(self._sizes, self._blocks, strict=True):
            largest = max((layer.numel for layer in layers), default=0)
            most = max(most, size + sum(layer.packed for layer in layers) + largest * (1 + self._item))
        return most

    def _whole(self) -> int:
        """Small artifacts are read as a whole, twice, with kernels that lay out their weights anew."""
        packed = sum(layer.packed for layer in self._layers.values())
        dense = sum(layer.numel * self._item for layer in self._layers.values())
        after = packed + sum(self._sizes) + self._outside - dense
        return 2 * after if after <= WHOLE_BYTES else 0

    def _judged(self, front: int, block: int) -> int:
        """Either model block by block, then what they say of the text, with both heads."""
        assert self._windows is not None
        config = self._recipe.evaluate
        batch = [(min(config.batch_size if config is not None else 1, self._windows[0]), self._windows[1])]
        judge = self._judge
        logits = 6 * 4 * max(LOGIT_ROWS, self._windows[1]) * self._plan.context.vocabulary
        runs = max(
            judge.itemsize * (judge.outside + judge.block) + judge.forward(batch),
            front + self._read_back() + self._model.forward(batch),
        )
        heads = 0 if self._model.encoder else max(judge.wide_copy, self._model.wide_copy) + logits
        return max(runs, judge.itemsize * judge.outside + self._outside + heads)

    def _advice(self, bounds: Bounds, rows: Rows) -> str:
        """What would make a run smaller: the batch if it matters, else only a larger machine."""
        batch, least = (max(self.phases(some, bounds).values()) for some in (rows, one_row_at_a_time(rows)))
        if batch - least > batch // 10:
            return "lower calibration.batch_size or sequence_length, or use a machine with more"
        return "its largest block and layer need that much; use a machine with more"

    def _seconds(self, count: int, scored: int, speed: Speed) -> float:
        """A guess: forward passes over `count` tokens, Hessians, column loops, start-up; `scored`: tokens that the result is judged by."""
        # Collecting stops early in three of four passes of a sequential block, and its attention is computed once; then one to go on.
        passed = self._streams * 1.6 * count
        total = 2.0 * (self._model.inside * (passed + scored) + self._judge.inside * scored) / speed.own
        for layer in self._layers.values():
            out, columns = layer.rows, layer.columns
            if layer.moments:  # symmetric ones are computed by half
                total += (2 * layer.moments - 1) * count * columns * columns / speed.single
                # The column loop, the error it leaves and what it is measured by; two more for a refinement pass; then the factor.
                sweeps = int(getattr(layer.task.quantize, "sweeps", 0) or 0)
                times = 3 + 2 * sweeps + _refitting(layer.task, layer.task.scheme)
                total += (times * out * columns * columns + columns**3 / 3) / speed.single
            total += out * columns * (8e-8 + _rounding_seconds(layer.task, layer.task.scheme))
        for layer in self._output_aware:
            out = layer.rows
            total += (count * out * out + out**3 / 3 + out * out * layer.columns) / speed.single
        if self._output_aware:  # there, and back with each block run again
            total += 2.0 * 4 * count * self._model.inside / speed.own
        if self._plan.budget is not None:
            total += self._measuring(count, speed)
        return 2.0 + total

    def _measuring(self, count: int, speed: Speed) -> float:
        """Seconds to measure what a budget chooses by: statistics of `count` tokens, each candidate solved, a model for each unit."""
        # On average through half of the blocks, at two candidates.
        passes = count * 2.5 + self._units() * min(count, MEASURED_TOKENS)
        total = 2.0 * self._model.inside * passes / speed.own
        total += 4.0 * self._units() * min(count, MEASURED_TOKENS) * self._model.outside / speed.own  # the head
        for layer in self._layers.values():
            if layer.task.candidates:
                loop = 3 * layer.rows * layer.columns**2 / speed.single + layer.numel * 8e-8
                total += len(layer.task.candidates) * loop + count * layer.columns**2 / speed.single
                refits = sum(_refitting(layer.task, one) for one in layer.task.candidates)
                total += refits * layer.rows * layer.columns**2 / speed.single
                total += layer.numel * sum(_rounding_seconds(layer.task, one) for one in layer.task.candidates)
        return total


def _rounding_seconds(task: LayerTask, scheme: Scheme) -> float:
    """For one weight, on one core, beyond what a grid takes: fitting and rounding to nearest, the column loop and every sweep."""
    passes = 2 + (1 + int(getattr(task.quantize, "sweeps", 0) or 0)) * task.compensates
    return 0.0 if scheme.weights is None else passes * scheme.weights.seconds


def _refitting(task: LayerTask, scheme: Scheme) -> int:
    """Operations for each row and pair of columns that refits of the parameters take, after the column loop and after every sweep."""
    if scheme.weights is None or not task.compensates:
        return 0
    return 2 * (1 + int(getattr(task.quantize, "sweeps", 0) or 0)) * scheme.weights.refit_products


def _layer(plan: WeightPlan, name: str, task: LayerTask) -> _Layer:
    streamed = plan.context.streamed
    rows, columns = (int(n) for n in get_matrix(streamed.model.get_submodule(name)).shape)
    density = 1.0 - task.share
    packed = formats.choose(task.scheme, (rows, columns), density=density)
    place = expert_of(streamed.model, name)
    home = "" if place is None else place[0]
    size = packed.bytes_estimate(task.scheme, (rows, columns), streamed.dtype, density)
    # Layers of one module and one width are taken to read the same input (q/k/v, gate/up), which is never too little.
    moments = len(task.needs & {"hessian", "drift"}) if not home else int("hessian" in task.needs)
    return _Layer(task, rows, columns, size, name.rpartition(".")[0], home, moments)


def _input(layer: _Layer) -> tuple[str, int]:
    return layer.reader, layer.columns
