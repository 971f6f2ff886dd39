"""The most that each phase of compressing a model holds at once, told from shapes: bytes beside what the process holds anyway.

One phase after the other: what comes before the first block; the blocks, each solved and written; what is in no block; the artifact read
back; the two models run over held-out text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import torch

from compress.pipeline.bounds import Bounds
from compress.pipeline.expert_calibration import AT_ONCE
from compress.pipeline.gate import WHOLE_BYTES
from compress.pipeline.needs import Counted, Rows
from compress.pipeline.session import Session
from compress.pipeline.work import LayerWork
from compress.solver import chunks, factor
from compress.statistics import BLOCK, ELEMENTS
from runtime import formats
from runtime.experts import expert_of
from runtime.matrices import get_matrix

Works = Mapping[str, LayerWork]

#: Float32 matrices as large as the chunk of a column loop that are there at its peak; and of rounding to nearest, whose is twice so large.
LOOP, NEAREST = 9, 6
#: Panels of a matrix in a file that are in memory at once: of the factor, those it looks back at, and copies.
FACTORED = 5


@dataclass(frozen=True)
class _Layer:
    """A layer's work, and its numbers. `packed`: bytes on the disk. `home`: of the experts that it belongs to one of; "": of none."""

    work: LayerWork
    rows: int
    columns: int
    packed: int
    reader: str
    home: str

    @property
    def numel(self) -> int:
        return self.rows * self.columns


class WorkingSet:
    """Of one session's work.

    Args:
        works: the layers' work. evaluation: ids `[n, s]` that the result is judged by; None: it is not.
        judge: the model that the result is compared with, where it is another.
    """

    def __init__(
        self, session: Session, works: Works, evaluation: torch.Tensor | None, judge: Counted | None = None
    ) -> None:
        streamed = session.streamed
        self.model = Counted.of(streamed)
        self.judge = judge or self.model
        self.session = session
        self.item = streamed.dtype.itemsize
        self._windows = None if evaluation is None else session.streamed.rows.positions(evaluation)
        self._layers = {name: _layer(session, name, work) for name, work in works.items()}
        self._blocks = [
            [layer for name, layer in self._layers.items() if name.startswith(streamed.block_prefix(index))]
            for index in range(len(streamed.blocks))
        ]
        self._sizes = [sum(p.numel() for p in block.parameters()) * self.item for block in streamed.blocks]
        names = streamed.outside_names()
        self._outside = sum(session.checkpoint.held_bytes(n) for n in names)
        self._head = sum(session.checkpoint.held_bytes(n) for n in names if streamed.is_head(n))

    @property
    def widths(self) -> list[int]:
        """Inputs of the layers whose second moments are collected."""
        return sorted({layer.columns for layer in self._layers.values() if "hessian" in layer.work.needs})

    def phases(self, rows: Rows, bounds: Bounds) -> dict[str, int]:
        """By name.

        Args:
            rows: shapes of the batches of calibration text.
        """
        front, block = self._outside - self._head, max(self._sizes)
        outside = [layer for name, layer in self._layers.items() if not self.session.streamed.is_inside(name)]
        forward = self.model.forward(rows)
        held = self._outside if outside else 0
        found = {
            "first block": max(held, front) + self._sizes[0] + forward,
            "blocks": held
            + max(
                self._block(size, layers, rows, bounds, forward)
                for size, layers in zip(self._sizes, self._blocks, strict=True)
            ),
            "outside": self._outside_phase(outside, rows, bounds),
            "load back": front + self._read_back() + self._whole(),
        }
        if self._windows is not None:
            found["evaluation"] = self._judged(front, block)
        return found

    # ------------------------------------------------------------ blocks
    def _block(self, size: int, layers: list[_Layer], rows: Rows, bounds: Bounds, forward: int) -> int:
        """One block of `size` bytes, its results, and what is in memory at once to make them."""
        kept = sum(layer.packed for layer in layers)
        # Layers with quantized activations give way to modules of their own; the originals come back afterwards.
        kept += sum(layer.numel * self.item for layer in layers if layer.work.scheme.activations is not None)
        transformed = any(layer.work.transform is not None for layer in layers)
        sequential = self.session.recipe.true_sequential
        groups = [list(group) for _, group in groupby(sorted(layers, key=_input), key=_input)]
        late = [g for g in groups if sequential and any(layer.work.compensates for layer in g)]
        early = [g for g in groups if g not in late or any(layer.work.transform is not None for layer in g)]
        waiting = sum(self._moments(group, bounds) for group in early)
        most = forward + waiting
        if transformed:  # float32 copies of all weights, after the whole block was float32
            most = max(most, waiting + 4 * size // self.item + max(2 * 4 * sum(x.numel for x in g) for g in groups))
            waiting += 4 * size // self.item
        for group in groups:
            own = self._wave(group, late, bounds) if group in late else 0
            collected = own + forward + self._inputs(group, rows) if own or group in early else 0
            most = max(most, waiting + max(collected, own + self._solve(group, bounds)))
        return size + kept + most

    def _moments(self, group: list[_Layer], bounds: Bounds) -> int:
        """Second moments of the input of a group, where they are collected."""
        columns = group[0].columns
        if not any("hessian" in layer.work.needs for layer in group):
            return 0
        return 4 * columns * (min(columns, 2 * BLOCK) if bounds.filed(columns) else columns)

    def _wave(self, group: list[_Layer], late: list[list[_Layer]], bounds: Bounds) -> int:
        """Those that are collected together with a group's: experts' are, up to a bound."""
        own = self._moments(group, bounds)
        if not group[0].home or not own:
            return own
        alike = sum(1 for other in late if other[0].home == group[0].home and other[0].columns == group[0].columns)
        return min(alike * own, max(own, AT_ONCE))

    def _inputs(self, group: list[_Layer], rows: Rows) -> int:
        """Inputs in float32, and as much again for what is reduced of them."""
        batch = max((shape[0] * shape[1] for shape in rows), default=0)
        return 2 * 4 * min(batch * group[0].columns, max(ELEMENTS, group[0].columns))

    def _solve(self, group: list[_Layer], bounds: Bounds) -> int:
        """Solving and packing the layers that share an input, beside its second moments."""
        columns, numel = group[0].columns, sum(layer.numel for layer in group)
        largest = max(layer.numel for layer in group)
        solved = pack = 0
        for layer in group:
            work, pattern = layer.work, None if layer.work.prune is None else layer.work.prune.parsed
            apart = chunks.rows_are_independent(pattern, work.scheme.weights)
            chunk = min(numel if work.compensates else layer.numel, chunks.rows_at_a_time(columns) * columns)
            if work.compensates:
                panels = 4 * columns * min(columns, factor.PANEL)
                needed = (
                    FACTORED * panels
                )  # of which two are of the factor, whose upper half is all that is ever touched
                if not bounds.filed(columns):
                    needed += max(0, 2 * columns * (columns + factor.PANEL) - 2 * panels)
                needed += LOOP * 4 * (chunk if apart else layer.numel)
            else:
                needed = NEAREST * 4 * min(layer.numel, 2 * chunk)
                if work.scheme.weights is not None and work.scheme.weights.strategy == "tensor":
                    needed += 2 * 4 * layer.numel
            if pattern is not None and not work.pruned:  # masks, and values fitted to them, or scores and their order
                needed += 6 * numel if work.compensates else numel + 20 * layer.numel
            solved = max(solved, needed)
            pack = max(pack, layer.packed + 2 * self.item * layer.numel + layer.numel)
        codes = numel * (1 if group[0].work.scheme.weights is not None else self.item)
        return codes + max(solved, pack, 2 * self.item * largest)

    def files(self, bounds: Bounds) -> int:
        """Bytes of second moments and factors in files, at the most."""
        filed = [
            layer for layer in self._layers.values() if bounds.filed(layer.columns) and "hessian" in layer.work.needs
        ]
        inputs = {
            (layer.reader, layer.columns) for layer in filed if not layer.work.compensates or layer.work.transform
        }
        largest = max((4 * layer.columns**2 for layer in filed), default=0)
        blocks = max(1, len(self._blocks))
        return sum(4 * columns**2 for _, columns in inputs) // blocks + max(
            2 * largest, AT_ONCE if any(x.home for x in filed) else 0
        )

    # ------------------------------------------------------------ before and after
    def _outside_phase(self, layers: list[_Layer], rows: Rows, bounds: Bounds) -> int:
        """What is in no block is read again to be written, beside what was solved of it."""
        if not layers:
            return self._outside
        made = sum(layer.packed + layer.numel * self.item for layer in layers)
        solve = max(
            max(self._moments([layer], bounds) + self._solve([layer], bounds), self._inputs([layer], rows))
            for layer in layers
        )
        return self._outside + made + max(solve, self._outside)

    def _read_back(self) -> int:
        """A block of the artifact: as it is stored, dense, and the layer that is unpacked."""
        most = 0
        for size, layers in zip(self._sizes, self._blocks, strict=True):
            largest = max((layer.numel for layer in layers), default=0)
            most = max(most, size + sum(layer.packed for layer in layers) + largest * (1 + self.item))
        return most

    def _whole(self) -> int:
        """Small artifacts are read as a whole, twice, with kernels that lay out their weights anew."""
        packed = sum(layer.packed for layer in self._layers.values())
        after = (
            packed + sum(self._sizes) + self._outside - sum(layer.numel * self.item for layer in self._layers.values())
        )
        return 2 * after if after <= WHOLE_BYTES else 0

    def _judged(self, front: int, block: int) -> int:
        """Either model block by block, then what they say of the text, with both heads."""
        from compress.pipeline.streamed_eval import LOGIT_ROWS

        assert self._windows is not None
        config = self.session.recipe.evaluate
        batch = [(min(config.batch_size if config is not None else 1, self._windows[0]), self._windows[1])]
        judge = self.judge
        logits = 6 * 4 * max(LOGIT_ROWS, self._windows[1]) * self.session.vocabulary
        runs = max(
            judge.itemsize * (judge.outside + judge.block) + judge.forward(batch),
            front + self._read_back() + self.model.forward(batch),
        )
        return max(runs, judge.itemsize * judge.outside + self._outside + (0 if self.model.encoder else logits))


def _layer(session: Session, name: str, work: LayerWork) -> _Layer:
    streamed = session.streamed
    rows, columns = (int(n) for n in get_matrix(streamed.model.get_submodule(name)).shape)
    density = 1.0 - work.share
    packed = formats.choose(work.scheme, (rows, columns), density=density)
    place = expert_of(streamed.model, name)
    size = packed.bytes_estimate(work.scheme, (rows, columns), streamed.dtype, density)
    # Layers of one module and one width are taken to read the same input (q/k/v, gate/up), which is never too little.
    return _Layer(work, rows, columns, size, name.rpartition(".")[0], "" if place is None else place[0])


def _input(layer: _Layer) -> tuple[str, int]:
    return layer.reader, layer.columns
