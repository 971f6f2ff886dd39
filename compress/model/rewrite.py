"""Rewrite of a whole checkpoint, block by block: the driver of stages that make another model of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file

from compress.core.files import intact, last_intact, seal, write_json, written_beside
from compress.core.progress import Reporter
from compress.model.checkpoint_writer import PlainWriter, config_dict
from compress.model.hidden_states import HiddenStates
from compress.model.streamed import Batch, StreamedModel
from compress.recipe.stages import Stage
from runtime.modeling.skeleton import build_skeleton

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Tensors = dict[str, torch.Tensor]
Lines = list[dict[str, Any]]


class RewritePlan(Protocol):
    """What a rewrite must know of its job."""

    @property
    def stage(self) -> Stage:
        """Of the recipe."""

    @property
    def config(self) -> PretrainedConfig:
        """Of the new model."""

    def describe(self) -> str:
        """See `compress.model.stage.Job`."""


Plan = TypeVar("Plan", bound=RewritePlan)


@dataclass(frozen=True)
class Pass(Generic[Plan]):
    """A run of a stage that makes a new checkpoint.

    Attributes:
        job: the stage, checked.
        streamed: the whole model.
        batches: calibration sequences. probe: ids that follow the model through, to be compared with what was written.
        output: for the new checkpoint. work: state for resuming an interrupted run.
        spill: hidden states are in files.
        reporter: of progress.
    """

    job: Plan
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
        self.reporter.phase(f"{self.job.stage.kind}: {title}", len(streamed.blocks))
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


class Rewrite(Generic[Plan]):
    """Writer of a new checkpoint, made of a whole model block by block: `write` writes every part of it, and can be interrupted.

    Args:
        run: the stage.
        followed: models whose hidden states are computed block by block, by name; the first one's are those of the new model.
        batches: that they are computed for, the probe last.
        beside: another model whose blocks are loaded too.

    Attributes:
        states: hidden states that enter the current block, of each followed model.
        config: of the new model.
    """

    def __init__(
        self,
        run: Pass[Plan],
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
        """The new model, on meta."""
        return build_skeleton(self.config, self.whole.dtype, stored=self.whole.checkpoint.names())

    # ---------------------------------------------------------------- hooks
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
        """A probe, and the hidden state that the new model should give for it after the last block."""
        first = next(iter(self.followed))
        return self.batches[-1], self.states[first].get(len(self.batches) - 1)

    # ---------------------------------------------------------------- the driver
    def write(self) -> dict[str, Any]:
        """Write the new checkpoint, from where an interrupted run has stopped; returns what `finish` says."""
        run, count = self.run, self.count
        run.work.mkdir(parents=True, exist_ok=True)
        writer = PlainWriter(run.output, count + 1, self.skeleton)
        written = writer.done()
        done = last_intact(min(written, count), self._directories, run.reporter.warn)
        if done < min(written, count):
            writer.forget(range(done, count + 1))
        elif written > count:
            done = written
        run.reporter.phase(f"{self.job.stage.kind}: {self.job.describe()}", count + 1, done)
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

    # ---------------------------------------------------------------- tensors
    def stored(self, names: Iterable[str]) -> Tensors:
        """Tensors of the whole model."""
        return {name: self.whole.checkpoint.get(name) for name in names}

    def loaded(self, name: str) -> torch.Tensor:
        """A parameter or buffer of the whole model that is in memory."""
        parent, _, leaf = name.rpartition(".")
        value = getattr(self.whole.model.get_submodule(parent), leaf)
        assert isinstance(value, torch.Tensor)
        return value.data
