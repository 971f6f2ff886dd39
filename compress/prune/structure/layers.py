"""Removal of the layers ranked least important, the same number from every stack."""

from __future__ import annotations

from typing import Any

import torch

from compress.model.config_sizes import layer_lists, with_layers
from compress.model.couplings import shapes
from compress.model.hidden_states import HiddenStates
from compress.model.hybrid_layers import attending, check_attending
from compress.model.partial import Stack
from compress.model.streamed import Batch, StreamedModel, run_blocks
from compress.prune.structure.removal import Lines, Pass, Plan, Removal, Tensors, best
from runtime.errors import RequestError
from runtime.modeling.experts import Experts, unfuse
from runtime.modeling.layer_sizes import overrides
from runtime.modeling.skeleton import build_skeleton, find_stacks


class LayerRemoval(Removal):
    """Copies the layers that stay to their new places."""

    def __init__(self, run: Pass) -> None:
        super().__init__(run)
        self.chosen: dict[str, Any] = run.once("layers.json", self._choose)
        self._kept: list[list[int]] = self.chosen["kept"]
        self._places = [
            (stack.first + old, f"{stack.name}.{new}.")
            for stack, kept in zip(self.whole.stacks, self._kept, strict=True)
            for new, old in enumerate(kept)
        ]
        self.config = with_layers(self.whole.config, self._kept[0])

    @classmethod
    def complete(cls, plan: Plan, streamed: StreamedModel) -> Plan:
        """See `Removal.complete`; layers have no slices."""
        if streamed.kind == "decoder":
            check_attending(streamed.config, plan.kept)
        return plan

    @property
    def count(self) -> int:
        """Layers that stay."""
        return len(self._places)

    def block(self, index: int) -> tuple[Tensors, Lines, str]:
        """A layer that stays, under its new name."""
        old, prefix = self._places[index]
        own = self.whole.block_prefix(old)
        tensors = self.stored(self.whole.block_names(old))
        return {prefix + name.removeprefix(own): value for name, value in tensors.items()}, [], f"was block {old}"

    def outside(self) -> tuple[Tensors, Lines]:
        """All that is in no block; layers for multi-token prediction have the numbers behind the last block's."""
        tensors, lines = super().outside()
        return {self._moved(name): value for name, value in tensors.items()}, lines

    def _moved(self, name: str) -> str:
        for stack, kept in zip(self.whole.stacks, self._kept, strict=True):
            prefix = f"{stack.name}."
            if name in self.whole.behind and name.startswith(prefix):
                number, _, local = name.removeprefix(prefix).partition(".")
                return f"{prefix}{int(number) - len(stack.blocks) + len(kept)}.{local}"
        return name

    def finish(self, lines: Lines) -> dict[str, Any]:
        """{"kept": for each stack the numbers of its layers that stay, "ranks": of all of them}."""
        return self.chosen

    def expected(self) -> tuple[Batch, torch.Tensor]:
        """What the model gives when its layers that are not kept are passed by."""
        skipped = set(range(len(self.whole.blocks))) - {old for old, _ in self._places}
        return self.run.probe, run_blocks(self.whole, [self.run.probe], None, skipped=skipped).get(0)

    # ---------------------------------------------------------------- which layers
    def _choose(self) -> dict[str, Any]:
        job, whole = self.job, self.whole
        influence = self._influence() if "influence" in job.needs else None
        kept, ranks = [], []
        for number, stack in enumerate(whole.stacks):
            blocks = range(stack.first, stack.first + len(stack.blocks))
            if len(blocks) != job.size.count:
                raise RequestError(
                    f"a stack of {len(blocks)} layers where config.json says {job.size.count} cannot be cut"
                )
            rank, _ = self.rank(
                f"the layers of {stack.name}", len(blocks), job.kept, number,
                weights=map(self._norms, [blocks]),
                influence=None if influence is None else influence[blocks.start : blocks.stop],
            )  # fmt: skip
            kept.append(self._fitting(number, stack, rank))
            ranks.append([float(value) for value in rank])
        if any(other != kept[0] for other in kept) and layer_lists(whole.config):
            raise RequestError("the stacks would keep different layers, and config.json has one list for both")
        return {"kept": kept, "ranks": ranks}

    def _norms(self, blocks: range) -> torch.Tensor:
        """`[layers, 1]`, the norm of all weights of each."""
        found = []
        for index in blocks:
            values = (self.whole.checkpoint.get(name).float() for name in self.whole.block_names(index))
            found.append(sum(float(value.square().sum()) for value in values) ** 0.5)
        return torch.tensor(found)[:, None]

    def _influence(self) -> torch.Tensor:
        """One minus the cosine of what enters and what leaves each block, mean over tokens: float32 `[blocks]`."""
        whole, batches = self.whole, self.run.batches
        found = torch.zeros(len(whole.blocks))

        def measure(index: int, states: HiddenStates) -> str:
            total = tokens = 0.0
            for number, batch in enumerate(batches):
                before = states.get(number).to(whole.device)
                after = whole.run_block(index, before, batch)
                length = whole.own_length(index, batch)
                turned = 1 - torch.cosine_similarity(before[:, :length].float(), after[:, :length].float(), dim=-1)
                turned = turned.flatten() if batch[1] is None else turned[batch[1].to(turned.device)]
                total += float(turned.sum())
                tokens += turned.numel()
                states.put(number, whole.hand_over(index, after, batch))
            found[index] = total / max(tokens, 1)
            return f": influence {found[index]:.3f}"

        self.run.visit("influence of layers", batches, measure)
        return found

    def _fitting(self, number: int, stack: Stack, rank: torch.Tensor) -> list[int]:
        """The layers that stay, ascending. One whose tensors no other has (T5's first has the bias of positions) cannot move, nor go."""
        whole, count = self.whole, self.job.kept
        layouts = [self._layout(stack.first + index) for index in range(len(rank))]
        rank = rank.clone()
        for index, layout in enumerate(layouts):
            if layouts.count(layout) == 1 and len(rank) > 1:
                rank[index] = torch.inf
        found: list[int] = best(rank, count).tolist()
        if whole.kind == "decoder":
            others = [index for index in rank.argsort(descending=True, stable=True).tolist() if index not in found]
            found = attending(whole.config, found, others, min(reversed(found), key=lambda index: float(rank[index])))
        smaller = build_skeleton(with_layers(whole.config, found), torch.float32, stored=whole.checkpoint.names())
        if any(isinstance(module, Experts) for module in whole.model.modules()):
            unfuse(smaller)
        for new, (old, block) in enumerate(zip(found, find_stacks(smaller)[number][1], strict=True)):
            if shapes(block) != shapes(stack.blocks[old]):
                raise RequestError(
                    f"layer {old} of a {type(whole.model).__name__} would come to the place of layer {new}, which is built otherwise"
                )
        return found

    def _layout(self, index: int) -> dict[str, tuple[int, ...]]:
        """Shapes by name, where layers should not differ in them; names alone where the config says of each layer how large it is."""
        prefix, known = self.whole.block_prefix(index), bool(overrides(self.whole.config))
        checkpoint = self.whole.checkpoint
        names = self.whole.block_names(index)
        return {name.removeprefix(prefix): () if known else checkpoint.shape(name) for name in names}
