"""Driver of structure pruning: a smaller checkpoint written block by block, along any axis."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.core.files import intact, last_intact, seal, write_json, written_beside
from compress.core.progress import Reporter
from compress.model.checkpoint_writer import PlainWriter, config_dict
from compress.model.couplings import Slices, changed
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.amount import skeleton_of
from compress.prune.structure.cut_plan import CutPlan, Plan
from compress.prune.structure.method import View
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import build_skeleton, find_stacks, set_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Pass:
    """A run of a stage `structure`.

    Attributes:
        job: the plan of the cut.
        streamed: the whole model.
        batches: calibration sequences. probe: ids that follow the model through, to be compared with what was written.
        output: for the smaller checkpoint. work: state for resuming an interrupted run.
        spill: hidden states are in files.
        reporter: of progress.
    """

    job: CutPlan
    streamed: StreamedModel
    batches: Sequence[Batch]
    probe: Batch
    output: Path
    work: Path
    spill: bool
    reporter: Reporter

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The JSON-able result of `compute`: computed once for a run and those that resume it."""
        file = self._sealed(name, lambda path: write_json(path, compute()))
        return json.loads(file.read_text(encoding="utf-8"))

    def tensors_once(self, name: str, compute: Callable[[], Tensors]) -> Tensors:
        """The same of tensors by name."""
        return load_file(self._sealed(name, lambda path: save_file(compute(), path)))

    def _sealed(self, name: str, write: Callable[[Path], None]) -> Path:
        file = self.work / name
        if not intact(file):
            self.work.mkdir(parents=True, exist_ok=True)
            with written_beside(file) as temporary:
                write(temporary)
            seal(file)
        return file

    def scratch(self, name: str) -> Path | None:
        """Directory that hidden states spill to; None: they stay in memory."""
        return self.work / f"{name}-next" if self.spill else None

    def visit(
        self,
        title: str,
        batches: Sequence[Batch],
        visitor: Callable[[int, HiddenStates], str],
        around: Callable[[Batch], AbstractContextManager[Any]] = lambda _: nullcontext(),
    ) -> None:
        """Measure something in one pass over the whole model, block by block.

        Args:
            visitor: called with the number of each block, loaded, and the states that enter it, which it advances; returns a note.
            around: is entered while the part before the blocks runs over a batch.
        """
        streamed = self.streamed
        self.reporter.phase(f"structure: {title}", len(streamed.blocks))
        states = HiddenStates(len(batches), self.scratch("measured"))
        streamed.load_outside()
        with torch.inference_mode():
            for number, batch in enumerate(batches):
                with around(batch):
                    streamed.prelude(list(batches), states, [number])
            for index in range(len(streamed.blocks)):
                with streamed.loaded_block(index):
                    note = visitor(index, states)
                self.reporter.step(f"block {index}{note}")
        states.drop()


class Cut:
    """Which units stay of which tensors: `cut(name, tensor)` is the tensor that the smaller model has.

    Args:
        parts: slices of a tensor, and the units that stay, int64, ascending.
    """

    def __init__(self, parts: Iterable[tuple[Slices, torch.Tensor]] = ()) -> None:
        self._parts: dict[str, list[tuple[Slices, torch.Tensor]]] = {}
        for slices, kept in parts:
            self._parts.setdefault(slices.name, []).append((slices, kept))

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without the units that go, in its own dtype."""
        for slices, kept in self._parts.get(name, ()):
            tensor = slices.cut(tensor, kept)
        return tensor

    def all(self, tensors: Tensors) -> Tensors:
        """Several, by name."""
        return {name: self(name, value) for name, value in tensors.items()}

    def slices(self, name: str) -> list[Slices]:
        """Those of one tensor."""
        return [slices for slices, _ in self._parts.get(name, ())]


class Removal:
    """Removal of the units of one axis: `write` writes every part of the smaller checkpoint, and can be interrupted.

    Args:
        run: the stage.
        followed: models whose hidden states are computed block by block, by name; the first one's are those of the smaller model.
        batches: that they are computed for, the probe last.
        beside: another model whose blocks are loaded too.

    Attributes:
        states: hidden states that enter the current block, of each followed model.
        config: of the smaller model.
    """

    def __init__(
        self,
        run: Pass,
        followed: Mapping[str, StreamedModel] | None = None,
        batches: Sequence[Batch] = (),
        beside: Iterable[StreamedModel] = (),
    ) -> None:
        self.run, self.job, self.whole = run, run.job, run.streamed
        self.followed, self.batches = dict(followed or {}), list(batches)
        self._loaded = [*beside, *self.followed.values()]
        self.states: dict[str, HiddenStates] = {}
        self.config = run.job.config

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The smaller model, on meta."""
        return build_skeleton(self.config, self.whole.dtype, stored=self.whole.checkpoint.names())

    @cached_property
    def smaller(self) -> list[nn.Module]:
        """Its blocks."""
        return [block for _, stack in find_stacks(self.skeleton) for block in stack]

    # ---------------------------------------------------------------- hooks of an axis
    @classmethod
    def check(cls, streamed: StreamedModel) -> None:
        """RequestError where no units of this axis can be removed from a model."""

    @classmethod
    def complete(cls, plan: Plan, streamed: StreamedModel) -> Plan:
        """The plan with the slices of its units, and the units of each block; RequestError where they cannot be cut."""
        slices = changed(streamed.model, skeleton_of(plan.config, streamed), plan.size.count, plan.kept)
        if not slices:
            kind = type(streamed.model).__name__
            raise RequestError(f"the config of a {kind} cannot say that it has fewer {plan.size.unit}")
        return replace(plan, slices=tuple(slices))

    @classmethod
    def complete_by_block(cls, plan: Plan, streamed: StreamedModel, units_of: Callable[..., tuple[Any, ...]]) -> Plan:
        """The same of units that are all in blocks; `units_of(model, slices, prefix)` gives those of a block."""
        plan = Removal.complete(plan, streamed)
        for part in plan.slices:
            if not streamed.is_inside(part.name):
                kind = type(streamed.model).__name__
                raise RequestError(f"{part.name} of a {kind} is in no layer and has parts of these {plan.size.unit}")
        prefixes = map(streamed.block_prefix, range(len(streamed.blocks)))
        return replace(plan, units=tuple(units_of(streamed.model, plan.slices, prefix) for prefix in prefixes))

    @property
    def count(self) -> int:
        """Parts of the checkpoint before the last, which holds everything outside of the blocks."""
        return len(self.whole.blocks)

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """Tensors of a part by name, a line for each layer that was changed, and a note; the block is loaded, and `states` advance."""
        return self.stored(self.whole.block_names(index)), [], "copied"

    def outside(self) -> tuple[Tensors, Lines]:
        """The same for everything outside of the blocks."""
        return self.stored(self.whole.outside_names()), []

    def finish(self, lines: Lines) -> dict[str, Any]:
        """The facts of the pass in the manifest, JSON-able: {"layers": a line for each layer that was changed}."""
        return {"layers": lines}

    def expected(self) -> tuple[Batch, torch.Tensor]:
        """A probe, and the hidden state that the smaller model should give for it after the last block."""
        first = next(iter(self.followed))
        return self.batches[-1], self.states[first].get(len(self.batches) - 1)

    # ---------------------------------------------------------------- the driver
    def write(self) -> dict[str, Any]:
        """Write the smaller checkpoint, from where an interrupted run has stopped; returns what `finish` says."""
        run, count = self.run, self.count
        run.work.mkdir(parents=True, exist_ok=True)
        writer = PlainWriter(run.output, count + 1, self.skeleton)
        written = writer.done()
        done = last_intact(min(written, count), self._directories, run.reporter.warn)
        if done < min(written, count):
            writer.forget(range(done, count + 1))
        elif written > count:
            done = written
        run.reporter.phase(f"structure: {self.job.describe()}", count + 1, done)
        self._enter(min(done, count))
        with torch.inference_mode():
            for index in range(done, count):
                with ExitStack() as stack:
                    for model in self._loaded:
                        stack.enter_context(model.loaded_block(index))
                    tensors, lines, note = self.block(index)
                self._persist(index + 1)
                writer.write(index, tensors, {"layers": lines})
                for directory in self._directories(index - 1):
                    shutil.rmtree(directory, ignore_errors=True)
                run.reporter.step(f"block {index}: {note}")
            if done <= count:
                tensors, lines = self.outside()
                writer.write(count, tensors, {"layers": lines})
                run.reporter.step("embeddings, final norm and head")
        lines = [line for part in range(count + 1) for line in writer.facts(part)["layers"]]
        source = self.whole.checkpoint
        writer.finish(source.path, config_dict(source, self.whole.config, self.config))
        return self.finish(lines)

    def advance(self, index: int) -> None:
        """Advance the states of all followed models past a block."""
        for name, model in self.followed.items():
            states = self.states[name]
            for number, batch in enumerate(self.batches):
                states.put(number, model.advance(index, states.get(number), batch))

    def _enter(self, done: int) -> None:
        """Set the states that enter the first block to be written."""
        for name, model in self.followed.items():
            model.load_outside()
            scratch = self.run.scratch(name)
            if done == 0:
                self.states[name] = HiddenStates(len(self.batches), scratch)
                model.prelude(self.batches, self.states[name])
                continue
            self.states[name] = HiddenStates.load(self._directory(name, done), len(self.batches), scratch)
            for batch in self.batches:
                model.block_kwargs(batch, min(done, len(model.blocks) - 1))

    def _persist(self, index: int) -> None:
        for name, states in self.states.items():
            states.persist(self._directory(name, index))
            seal(self._directory(name, index))

    def _directories(self, index: int) -> list[Path]:
        """Directories that a run needs to resume at a block."""
        return [self._directory(name, index) for name in self.followed]

    def _directory(self, name: str, index: int) -> Path:
        return self.run.work / f"{name}-{index:05d}"

    # ---------------------------------------------------------------- shared by axes
    def first_row(self) -> tuple[torch.Tensor, Batch]:
        """One row that enters the current block, and its batch, for trials."""
        ids, mask = self.batches[0]
        return self.states["hidden"].get(0)[:1], (ids[:1], None if mask is None else mask[:1])

    def stored(self, names: Iterable[str]) -> Tensors:
        """Tensors of the whole model."""
        return {name: self.whole.checkpoint.get(name) for name in names}

    def loaded(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the whole model that is in memory."""
        parent, _, leaf = name.rpartition(".")
        value = getattr(self.whole.model.get_submodule(parent), leaf)
        assert isinstance(value, torch.Tensor)
        return value.data

    def cut_block(self, index: int, cut: Cut) -> nn.Module:
        """The smaller model's block, cut out of the one in memory."""
        block, prefix = copy.deepcopy(self.smaller[index]), self.whole.block_prefix(index)
        for name in [name for name, _ in [*block.named_parameters(), *block.named_buffers()]]:
            set_tensor(block, name, cut(prefix + name, self.loaded(prefix + name)))
        return block

    def rank(self, what: str, count: int, kept: int, seed: int, **seen: Any) -> tuple[torch.Tensor, dict[str, float]]:
        """Importance of each unit, float32, and the notes of the method.

        Args:
            what: "the experts of layer 3". seed: added to the recipe's. seen: fields of the `View`.
        """
        method, settings = self.job.method, self.job.settings
        view = View(count, kept, torch.Generator().manual_seed(settings.seed + seed), **seen)
        rank = method.rank(view, settings)
        if not bool(torch.isfinite(rank).all()):
            raise CompressError(f"{what} cannot be ranked: {method.name} gives NaN or Inf")
        return rank, view.notes


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """CompressError that names the tensor with NaN or Inf."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CompressError(f"{name}: the weight holds NaN or Inf; repair the checkpoint")


def note_of(lines: Lines) -> str:
    """Progress note of a block: the largest error of its layers."""
    worst = max((line["error"] for line in lines if line["error"] is not None), default=None)
    return "cut" if worst is None else f"cut, error {worst:.2e}"


def best(rank: torch.Tensor, count: int, groups: int = 1) -> torch.Tensor:
    """Which units stay, ascending: int64 `[count]`, of each group as many; of equals the first."""
    order = rank.reshape(groups, -1).argsort(dim=1, descending=True, stable=True)[:, : count // groups]
    return (order + torch.arange(groups, device=rank.device)[:, None] * (len(rank) // groups)).reshape(-1).sort().values
