"""Removal of dimensions of the hidden state, the same ones from every tensor that has them.

Norms are corrected for the smaller root mean square, and linear layers refitted to their former outputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from compress.model.checkpoint_writer import zeros
from compress.model.config_sizes import resized, size_of, with_wider_heads
from compress.model.couplings import changed, changed_shapes
from compress.model.hidden_states import HiddenStates
from compress.model.module_hooks import hooks
from compress.model.source import DerivedCheckpoint
from compress.model.streamed import Batch, StreamedModel
from compress.prune.structure.amount import skeleton_of
from compress.prune.structure.hidden_norms import HiddenCut, find_norms, gain, measure
from compress.prune.structure.hidden_refit import Refit
from compress.prune.structure.removal import Lines, Pass, Plan, Removal, Tensors, best, note_of
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError

# Relative difference allowed: blocks are compared in float32, tensors outside them in the model's own dtype.
TOLERANCE = 1e-3
OUTSIDE_TOLERANCE = 3e-2
# Factors this close to one are rounding errors.
_ONE = 1e-3


Call = Callable[[StreamedModel, Any], torch.Tensor]


class Comparison:
    """Comparison of the whole model with the smaller one.

    Args:
        whole, smaller: both with the tensors outside the blocks loaded; the smaller one's are loaded again by `settle_scales`.
        cut: the removal that leads from one to the other.
        batch: a row of ids.
    """

    def __init__(self, whole: StreamedModel, smaller: StreamedModel, cut: HiddenCut, batch: Batch) -> None:
        self.whole, self.smaller, self.cut, self.batch = whole, smaller, cut, batch
        self._outside = [name for name in cut.norms if not whole.is_inside(name)]
        self._factors: dict[str, float] = {}  # of norms, for a head whose weight cannot take them
        self._ran: list[str] = []  # norms, in the order in which they were run

    @torch.inference_mode()
    def settle_scales(self) -> None:
        """Find the factors that the model derives from its hidden size, put them into `cut`, and load the smaller model's tensors outside
        the blocks with them.

        Raises:
            RequestError: the two differ by more than a factor.
        """
        self.smaller.load_outside()
        factor, _ = self._entering()
        if abs(factor - 1) > _ONE:
            self.cut.scales |= dict.fromkeys(self._same_as(self.smaller.model.get_input_embeddings()), 1 / factor)
            self.smaller.load_outside()
        self._require(self._entering(), "what enters the first layer")
        if self.smaller.kind != "encoder":
            self._settle_head()
        self._require(self._leaving(), "what comes after the last layer")

    def _settle_head(self) -> None:
        """Scale the head's weight, or the norm before it, so that the head's outputs equal the whole model's."""
        heads = [model.model.get_output_embeddings() for model in (self.smaller, self.whole)]
        given: dict[nn.Module, torch.Tensor] = {}

        def look(head: Any, _args: Any, output: torch.Tensor) -> None:
            bias = getattr(head, "bias", None)
            given[head] = output if bias is None else output - bias

        # Hooks on the head itself: operations after it (Gemma's soft caps) are not linear.
        with hooks(dict.fromkeys(heads, look)):
            self._leaving()
        factor, _ = _compared(*(given[head] for head in heads))
        if abs(factor - 1) <= _ONE:
            return
        names = self._same_as(heads[0])
        if not names & self._same_as(self.smaller.model.get_input_embeddings()):
            self.cut.scales |= dict.fromkeys(names, 1 / factor)
        elif self._ran:
            last = self._ran[-1]
            self._factors[last] = 1 / factor
            self.cut.gains[last] = self.cut.gains.get(last, 1.0) / factor
            self.cut.scales[f"{last}.bias"] = 1 / factor
        self.smaller.load_outside()

    @torch.inference_mode()
    def check_block(self, index: int, state: torch.Tensor) -> None:
        """Raise `RequestError` where the two blocks `index`, both loaded, give different outputs for a hidden state."""
        ours, theirs = (copy.deepcopy(model.blocks[index]).float() for model in (self.smaller, self.whole))
        prefix = self.whole.block_prefix(index)
        inside = [name.removeprefix(prefix) for name in self.cut.norms if name.startswith(prefix)]
        found = self.smaller.run_block(index, state, self.batch, torch.float32, ours)
        with self._normed(theirs, ours, inside):
            wide = self.whole.run_block(index, self._wide(state), self.batch, torch.float32, theirs)
        self._require(_compared(found, self._narrow(wide)), prefix.removesuffix("."), TOLERANCE)

    # ---------------------------------------------------------------- the parts outside of the blocks
    def _entering(self) -> tuple[float, float]:
        return self._compare(lambda model, _: _prelude(model, self.batch))[0]

    def _leaving(self) -> tuple[float, float]:
        """Factor and difference of the logits (of an encoder: hidden states)."""
        state, ids = _prelude(self.smaller, self.batch), self.batch[0]
        if len(self.smaller.stacks) == 2:
            last = self.smaller.stacks[1].first - 1
            found, state = self._compare(lambda model, given: model.hand_over(last, given, self.batch), state)
            self._require(found, "what enters the decoder")
        narrow = self.smaller.kind == "encoder"
        return self._compare(lambda model, given: model.outputs(given, ids), state, narrow)[0]

    def _compare(
        self, run: Call, state: torch.Tensor | None = None, narrow: bool = True
    ) -> tuple[tuple[float, float], torch.Tensor]:
        """Factor and difference of both models' outputs, and the smaller one's output. `narrow`: the output is a hidden state."""
        found = run(self.smaller, state)
        self._ran.clear()
        with self._normed(self.whole.model, self.smaller.model, self._outside):
            wide = run(self.whole, None if state is None else self._wide(state))
        return _compared(found, self._narrow(wide) if narrow else wide), found

    def _same_as(self, module: nn.Module) -> set[str]:
        """Names of the stored tensors that are a module's weight or tied to it."""
        ties = self.smaller.ties
        own = {f"{name}.weight" for name, other in self.smaller.model.named_modules() if other is module}
        shared = {ties.get(name, name) for name in own}
        return own | {name for name in (*ties, *ties.values()) if ties.get(name, name) in shared}

    # ---------------------------------------------------------------- states of one model in the other
    def _wide(self, state: torch.Tensor) -> torch.Tensor:
        """The hidden state widened for the whole model, with zeros in the removed dimensions."""
        wide = torch.zeros(*state.shape[:-1], self.cut.count, dtype=state.dtype, device=state.device)
        wide[..., self.cut.kept.to(state.device)] = state
        return wide

    def _narrow(self, state: torch.Tensor) -> torch.Tensor:
        return state[..., self.cut.kept.to(state.device)]

    def _normed(self, whole: nn.Module, smaller: nn.Module, names: Iterable[str]) -> AbstractContextManager[None]:
        """While active, norms of the whole model return the smaller model's outputs, widened."""

        def replaced(name: str, norm: nn.Module) -> Callable[..., torch.Tensor]:
            def hook(_module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
                self._ran.append(name)
                given = norm(self._narrow(args[0])) / self._factors.get(name, 1.0)
                return self._wide(given.to(output.dtype))

            return hook

        return hooks({whole.get_submodule(name): replaced(name, smaller.get_submodule(name)) for name in names})

    def _require(self, found: tuple[float, float], where: str, tolerance: float = OUTSIDE_TOLERANCE) -> None:
        factor, difference = found
        if abs(factor - 1) <= _ONE and difference < tolerance:
            return
        raise RequestError(
            f"{where} of a {type(self.whole.model).__name__} changes when dimensions of the hidden state are removed (factor {factor:.3g}, "
            f"relative difference {difference:.1e}): the model depends on its hidden size in a way that its shapes do not show"
        )


def _prelude(streamed: StreamedModel, batch: Batch) -> torch.Tensor:
    states = HiddenStates(1)
    streamed.prelude([batch], states)
    return states.get(0)


def _compared(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The factor of the best fit `found = factor * expected`, and the relative difference that remains."""
    one, other = found.double().cpu(), expected.double().cpu()
    size = float(other.square().sum())
    if size == 0:
        return 1.0, float(one.norm())
    factor = float((one * other).sum()) / size
    return factor, float((one - factor * other).norm()) / max(abs(factor), 1e-30) / size**0.5


class HiddenRemoval(Removal):
    """Removes dimensions block by block, compares each block with the whole model's, and refits its layers.

    Raises:
        RequestError: the model depends on its hidden size in a way that its shapes do not show. CompressError: weights or hidden states
            with NaN or Inf.
    """

    def __init__(self, run: Pass) -> None:
        job, whole, fitted = run.job, run.streamed, run.job.settings.reconstruct
        norms = find_norms(whole.model, job.slices)
        states, shares = measure(run, norms)
        zeros(run.work / "outline", whole, job.config)  # the form of the smaller model
        smaller = StreamedModel(Checkpoint(run.work / "outline"), whole.device, dtype=whole.dtype)
        followed = {"ours": smaller, **({"theirs": whole} if fitted else {})}
        batches = [*run.batches, run.probe] if fitted else [run.probe]
        super().__init__(run, followed, batches, beside=[] if fitted else [whole])
        kept = best(self._ranked(states), job.kept)
        gains = {name: gain(own, kept) for name, own in shares.items()}
        self.cut = HiddenCut(job.slices, kept, job.size.count, norms, gains)
        smaller.checkpoint = DerivedCheckpoint(
            smaller.checkpoint, lambda name: self.cut(name, whole.checkpoint.get(name))
        )
        smaller.ties = dict(whole.ties)  # zeros are all alike, so the outline cannot say which are tied
        self.model = smaller
        self._refit = Refit(whole, smaller, self.cut, self.batches[:-1], job.settings.damping) if fitted else None
        whole.load_outside()
        self._comparison = Comparison(whole, smaller, self.cut, run.probe)
        self._comparison.settle_scales()
        extra = [name for name in whole.extra if name not in whole.checkpoint.dropped]
        self._left_out = [name for name in extra if job.size.count in whole.checkpoint.shape(name)]
        self._extra = [name for name in extra if name not in self._left_out]

    @classmethod
    def check(cls, streamed: StreamedModel) -> None:
        """RequestError where heads get narrower when the hidden state does: matrices of the layers would change along both sides."""
        whole = streamed.model
        if changed_shapes(whole, skeleton_of(with_wider_heads(streamed.config), streamed)):
            return  # the config says how wide they are
        half = size_of(streamed.config, "hidden").count // 2
        try:
            slices = changed(whole, skeleton_of(resized(streamed.config, "hidden", half), streamed), 2 * half, half)
            inside = [s.name for s in slices if streamed.is_inside(s.name)]
        except RequestError:  # so few dimensions are no whole heads
            inside = [""] * 2
        if len(set(inside)) < len(inside):
            raise RequestError(
                f"{type(whole).__name__} derives head_dim from hidden_size and has no head_dim key; "
                "hidden dimensions cannot be removed alone"
            )

    @classmethod
    def complete(cls, plan: Plan, streamed: StreamedModel) -> Plan:
        """See `Removal.complete`; RequestError where something inside of a layer is a multiple as wide as the hidden state (Mamba's inner
        channels): it would be cut as if it were the hidden state."""
        plan = Removal.complete(plan, streamed)
        for part in plan.slices:
            if part.each > 1 and streamed.is_inside(part.name):
                raise RequestError(
                    f"{part.name} of a {type(streamed.model).__name__} has {part.each} values for each dimension of the hidden state, and "
                    "its config cannot say that they stay: dimensions of the hidden state cannot be removed alone"
                )
        return plan

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """See `Removal.block`."""
        states = self.states["ours"]
        self._comparison.check_block(index, states.get(len(self.batches) - 1).to(self.model.device))
        lines = self._refit.block(index, self.states["theirs"], states) if self._refit is not None else []
        self.advance(index)
        return self._tensors(self.model.block_names(index), lines), lines, note_of(lines)

    def outside(self) -> tuple[Tensors, Lines]:
        """See `Removal.outside`."""
        lines = [] if self._refit is None else self._refit.head(self.states["theirs"], self.states["ours"])
        return self._tensors(self.model.outside_names(), lines) | self.stored(self._extra), lines

    def finish(self, lines: Lines) -> dict[str, Any]:
        """{"dimensions": those that stay, "gains": by what each norm's output is multiplied, "layers": a line for each layer that was
        fitted, "left_out": tensors that the model has no place for and that are as wide as it was}."""
        gains = dict(sorted(self.cut.gains.items()))
        return {"dimensions": self.cut.kept.tolist(), "gains": gains, "layers": lines, "left_out": self._left_out}

    def _tensors(self, names: Iterable[str], lines: Lines) -> Tensors:
        """Tensors of the smaller model, those that were fitted as they are in memory."""
        found = {name: self.model.checkpoint.get(name) for name in names}
        for name in (f"{line['name']}.weight" for line in lines):
            found[name] = self.model.model.get_parameter(name).data.to(self.model.checkpoint.dtype(name))
        return found

    def _ranked(self, states: torch.Tensor | None) -> torch.Tensor:
        """Float32 `[dimensions]`, larger for what matters more."""
        job, checkpoint = self.job, self.whole.checkpoint
        if "states" in job.method.needs and states is None:
            raise CompressError(
                f"no linear layer of a {type(self.whole.model).__name__} reads the hidden state, so {job.method.name} cannot rank its "
                "dimensions"
            )
        # Of each stored tensor, one after the other, the norm of what each dimension has of it.
        stored = (part for part in job.slices if checkpoint.has(part.name))
        norms = (part.by_unit(checkpoint.get(part.name).float()).norm(dim=1, keepdim=True) for part in stored)
        return self.rank("the dimensions", job.size.count, job.kept, 0, weights=norms, states=states)[0]
