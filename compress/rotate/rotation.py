"""Rotation of the tensors of a model: which of their sides are rotated, and which weights of norms are folded into them.

No architecture is named. Sides that are the hidden state are those whose length changes with its size; which norm a layer reads is observed
in a run of the block; and every block must compute what it did.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from compress.core.tensors import relative
from compress.model.couplings import Slices, input_dim
from compress.model.module_hooks import hooks
from compress.prune.structure.hidden_norms import Norm
from runtime.errors import RequestError
from runtime.modeling.skeleton import set_tensor

Run = Callable[[nn.Module, bool], torch.Tensor]
"""Runs a block over a probe, which is rotated where the second argument says so: `[b, s, hidden]` float32."""

# Relative difference of what each layer writes, and of what the block adds to its input, in float32.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class SideRotation:
    """Rotation of one side of a tensor.

    Attributes:
        dim: along it.
        matrix: `[n, n]`; a longer side is rotated piece by piece.
        gain: `[n]`, multiplied in before; None: nothing is.
        start: of the first piece; numbers before it stay.
    """

    dim: int
    matrix: torch.Tensor
    gain: torch.Tensor | None = None
    start: int = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rotated tensor, in float32 or its own wider dtype."""
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        moved = tensor.to(dtype).movedim(self.dim, -1)
        pieces = moved[..., self.start :].unflatten(-1, (-1, len(self.matrix)))
        rotated = ((pieces if self.gain is None else pieces * self.gain) @ self.matrix.to(dtype)).flatten(-2)
        if self.start:
            rotated = torch.cat([moved[..., : self.start], rotated], -1)
        return rotated.movedim(-1, self.dim)


@dataclass
class Rotation:
    """What becomes of tensors, by their names; others stay as they are.

    Attributes:
        sides: of each tensor, one after the other.
        unit_norms: {weight of a norm: the number with which it multiplies by one}.
    """

    sides: dict[str, list[SideRotation]] = field(default_factory=dict)
    unit_norms: dict[str, float] = field(default_factory=dict)

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rotated tensor, float32 where anything changed."""
        if name in self.unit_norms:
            return torch.full_like(tensor, self.unit_norms[name])
        for side in self.sides.get(name, ()):
            tensor = side(tensor)
        return tensor

    def with_sides(self, sides: Iterable[tuple[str, SideRotation]]) -> Rotation:
        """A copy with more of them."""
        found = {name: list(own) for name, own in self.sides.items()}
        for name, side in sides:
            found.setdefault(name, []).append(side)
        return Rotation(found, dict(self.unit_norms))

    def block(self, block: nn.Module, prefix: str) -> nn.Module:
        """A rotated copy of a block in memory, float32; `prefix` is that of its tensors."""
        made = copy.deepcopy(block).float()
        for name, parameter in list(made.named_parameters()):
            set_tensor(made, name, self(prefix + name, parameter.data))
        return made


@dataclass(frozen=True)
class HiddenRotation:
    """Rotation of the hidden state (R1).

    Attributes:
        matrix: float32 `[hidden, hidden]`.
        slices: the sides of tensors that have the hidden state along them.
        norms: over the hidden state, by name.
        read: the weight or bias of a norm, by the name of the tensor.
    """

    matrix: torch.Tensor
    slices: Sequence[Slices]
    norms: Mapping[str, Norm]
    read: Callable[[str], torch.Tensor | None]

    def gain(self, norm: str) -> torch.Tensor:
        """What a norm multiplies by, float32 `[hidden]`."""
        weight = self.read(f"{norm}.weight")
        assert weight is not None
        return weight.float() + self.norms[norm].offset

    def given(self, norm: str, x: torch.Tensor) -> torch.Tensor:
        """What a norm without weights gives for inputs `[n, hidden]`, float32; a bias is divided by them, as in `fold_norms`."""
        x = x.float()
        if self.norms[norm].centred:
            x = x - x.mean(1, keepdim=True)
        x = x / x.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30)
        bias = self.read(f"{norm}.bias")
        return x if bias is None else x + bias.float() / self.gain(norm)

    def fold_norms(self, names: Iterable[str]) -> Rotation:
        """Norms without weights of their own: layers that read them have those. A bias `b` becomes `b / gain`, rotated."""
        found = Rotation()
        for name in names:
            found.unit_norms[f"{name}.weight"] = 1.0 - self.norms[name].offset
            bias = self.read(f"{name}.bias")
            if bias is None:
                continue
            gain = self.gain(name)
            if bool((gain == 0).any()):
                raise RequestError(f"{name} has weights of zero and a bias, which cannot be folded into what reads it")
            found.sides[f"{name}.bias"] = [SideRotation(0, self.matrix, 1 / gain)]
        return found

    def norms_of(self, prefix: str) -> list[str]:
        """Names of a block's norms."""
        return [name for name in self.norms if name.startswith(prefix)]

    def readers(self, block: nn.Module, prefix: str, run: Callable[[], object]) -> dict[str, str]:
        """{name of a module of a block: the norm whose output it reads}, of one run.

        Raises:
            RequestError: no linear layer reads a norm.
        """
        norms = self.norms_of(prefix)
        owners = sorted(
            {part.name.rpartition(".")[0] for part in self.slices if part.name.startswith(prefix)} - set(norms)
        )
        modules = {name: block.get_submodule(name.removeprefix(prefix)) for name in (*owners, *norms)}
        reads = _read_norms(modules, norms, run)
        unread = sorted(set(norms) - set(reads.values()))
        if len(unread) == 1:  # what it gives may be multiplied by a number on its way
            alone = [name for name in owners if name not in reads and self._reads(modules[name], name)]
            reads |= dict.fromkeys(alone, unread[0])
        if unread and not set(unread) <= set(reads.values()):
            raise RequestError(
                f"{unread[0]}: no linear layer reads the output of this norm (post-norms, as in Gemma 2 and OLMo 2), so its weights cannot "
                "be folded; set hidden: false"
            )
        return reads

    def bare_readers(self, block: nn.Module, prefix: str, reads: Mapping[str, str]) -> list[str]:
        """Names of a block's linear layers whose inputs are the hidden state, but of no norm in `reads`."""
        owners = {part.name.rpartition(".")[0] for part in self.slices if part.name.startswith(prefix)}
        modules = {
            name: block.get_submodule(name.removeprefix(prefix)) for name in owners - self.norms.keys() - reads.keys()
        }
        return sorted(name for name, module in modules.items() if self._reads(module, name))

    def of_block(self, block: nn.Module, prefix: str, run: Run) -> Rotation:
        """The rotation of a block's tensors.

        Args:
            block: float32, in memory. prefix: of its tensors.

        Raises:
            RequestError: the block would compute something else.
        """
        slices = [part for part in self.slices if part.name.startswith(prefix)]
        reads, norms = self.readers(block, prefix, lambda: run(block, False)), self.norms_of(prefix)
        owners = sorted({part.name.rpartition(".")[0] for part in slices} - set(norms))
        modules = {name: block.get_submodule(name.removeprefix(prefix)) for name in owners}
        found, ambiguous = self.fold_norms(norms), list[tuple[str, SideRotation, SideRotation]]()
        for owner in owners:
            gain = self.gain(reads[owner]) if owner in reads else None
            own = [part for part in slices if part.name.rpartition(".")[0] == owner]
            inputs = input_dim(modules[owner])
            if inputs is not None:
                found = found.with_sides(self._linear(own, inputs, gain))
                continue
            for part in own:
                side = SideRotation(part.dim, self.matrix)
                if gain is None:
                    found = found.with_sides([(part.name, side)])
                else:  # a router, or experts: some read what comes in, and some write
                    ambiguous.append((part.name, side, replace(side, gain=gain)))
        if len(ambiguous) > 4:
            raise RequestError(
                f"{ambiguous[0][0]} and {len(ambiguous) - 1} more: which of these tensors read the norm is not clear; set hidden: false"
            )
        candidates = [
            found.with_sides((name, choice) for (name, *_), choice in zip(ambiguous, choices, strict=True))
            for choices in itertools.product(*(sides for _, *sides in ambiguous))
        ]
        writers = [
            name.removeprefix(prefix)
            for name in owners
            if (inputs := input_dim(modules[name])) is not None
            and any(side.dim != inputs for side in found.sides.get(f"{name}.weight", ()))
        ]
        compare = Comparison(block, prefix, run, writers, self.matrix)
        differences = [compare(rotation) for rotation in candidates]
        best = min(range(len(candidates)), key=differences.__getitem__)
        if not differences[best] < TOLERANCE:
            raise RequestError(
                f"{prefix.removesuffix('.')} computes something else when the hidden state is rotated (relative {differences[best]:.1e}); "
                "set hidden: false"
            )
        return candidates[best]

    def _linear(self, own: list[Slices], inputs: int, gain: torch.Tensor | None) -> Iterable[tuple[str, SideRotation]]:
        """Sides of a linear layer: of its inputs where it reads the hidden state, else of its outputs and bias."""
        weight = [part for part in own if part.name.endswith(".weight")]
        reader = gain is not None or all(part.dim == inputs for part in weight)
        for part in own:
            if part in weight and (part.dim == inputs) == reader:
                yield part.name, SideRotation(part.dim, self.matrix, gain)
            elif part not in weight and not reader:
                yield part.name, SideRotation(part.dim, self.matrix)

    def _reads(self, module: nn.Module, name: str) -> bool:
        """Whether of a linear layer's sides the inputs alone are the hidden state."""
        dims = {part.dim for part in self.slices if part.name == f"{name}.weight"}
        return input_dim(module) is not None and dims == {input_dim(module)}

    def outside_blocks(self, model: nn.Module, names: Iterable[str], final: str | None) -> Rotation:
        """Of tensors that are in no block.

        Args:
            names: of the tensors. final: the norm before the head.
        """
        found, wanted = self.fold_norms([] if final is None else [final]), set(names)
        head = model.get_output_embeddings()  # type: ignore[operator]
        for part in (part for part in self.slices if part.name in wanted):
            owner, _, leaf = part.name.rpartition(".")
            module = model.get_submodule(owner)
            if owner == final:
                continue
            if isinstance(module, nn.Embedding) or (input_dim(module) is not None and leaf in ("weight", "bias")):
                gain = self.gain(final) if module is head and final is not None else None
                found = found.with_sides([(part.name, SideRotation(part.dim, self.matrix, gain))])
                continue
            raise RequestError(
                f"{part.name} ({type(module).__name__}) acts on single dimensions of the hidden state, which then cannot be rotated; "
                "set hidden: false"
            )
        return found


def rotate_values(
    block: nn.Module, prefix: str, hidden: Rotation, compare: Callable[[str], Comparison], pairs: Sequence[ValuePair]
) -> tuple[Rotation, ValuePair | None]:
    """The rotation of a block with the values of every head rotated as well (R2), and where; None where no pair leaves its function.

    Args:
        hidden: what is rotated already. compare: of a layer that writes. pairs: that are tried, likeliest first.
    """
    for pair in pairs:
        rotation = hidden.with_sides(pair.sides(block, prefix))
        if compare(pair.consumer)(rotation) < TOLERANCE:
            return rotation, pair
    return hidden, None


@dataclass(frozen=True)
class ValuePair:
    """The layer that makes the values of all heads, and the one that reads what attention makes of them.

    Attributes:
        producer, consumer: names in the block. start: of the values among the producer's outputs.
        matrix: float32 `[width, width]` of a head.
    """

    producer: str
    consumer: str
    start: int
    matrix: torch.Tensor

    @property
    def name(self) -> tuple[str, str, int]:
        """The same for the same pair of every block."""
        return self.producer, self.consumer, self.start

    def sides(self, block: nn.Module, prefix: str) -> Iterable[tuple[str, SideRotation]]:
        """Sides of their tensors."""
        producer, consumer = block.get_submodule(self.producer), block.get_submodule(self.consumer)
        inputs = input_dim(producer)
        assert inputs is not None
        yield f"{prefix}{self.producer}.weight", SideRotation(1 - inputs, self.matrix, start=self.start)
        if getattr(producer, "bias", None) is not None:
            yield f"{prefix}{self.producer}.bias", SideRotation(0, self.matrix, start=self.start)
        inputs = input_dim(consumer)
        assert inputs is not None
        yield f"{prefix}{self.consumer}.weight", SideRotation(inputs, self.matrix)


def value_pairs(
    block: nn.Module, heads: int, hidden: int, matrix: Callable[[int], torch.Tensor | None]
) -> list[ValuePair]:
    """Pairs that might be: in each attention module (one that has a `head_dim`), every pair of layers whose shapes allow it.

    Args:
        heads: of keys and values. hidden: size of the hidden state, which the consumer writes. matrix: of a width; None: there is none.
    """
    found = []
    for name, module in block.named_modules():
        width = getattr(module, "head_dim", None)
        turned = matrix(width) if isinstance(width, int) else None
        if not isinstance(width, int) or turned is None:
            continue
        layers = {key: child for key, child in module.named_children() if input_dim(child) is not None}
        own = {f"{name}.{key}": layer.weight.shape for key, layer in layers.items()}  # type: ignore[union-attr]
        sides = {
            key: (shape[input_dim(layer)], shape[1 - input_dim(layer)])  # type: ignore[operator, index]
            for (key, shape), layer in zip(own.items(), layers.values(), strict=True)
        }
        for (consumer, (reads, writes)), (producer, (_, gives)) in itertools.permutations(sides.items(), 2):
            start = gives - heads * width
            if writes != hidden or reads % width or start not in (0, reads + heads * width):
                continue
            found.append(ValuePair(producer, consumer, start, turned))
    # The last of queries, keys and values makes the values, as a rule.
    return found[::-1]


@dataclass(frozen=True)
class Comparison:
    """Comparison of a block with a rotated copy: by what layers write, and by what the block adds to its input.

    Attributes:
        block: float32. prefix: of its tensors.
        writers: names in the block of layers whose outputs go into the hidden state.
        matrix: that the hidden state is rotated by; None: it is not.
    """

    block: nn.Module
    prefix: str
    run: Run
    writers: Sequence[str]
    matrix: torch.Tensor | None

    def __call__(self, rotation: Rotation) -> float:
        """The largest relative difference."""
        original = self._written(self.block, False)
        rotated = self._written(rotation.block(self.block, self.prefix), self.matrix is not None)
        return max(
            relative(theirs, ours if self.matrix is None else ours @ self.matrix)
            for theirs, ours in zip(rotated, original, strict=True)
        )

    @torch.no_grad()
    def _written(self, block: nn.Module, rotated: bool) -> list[torch.Tensor]:
        """What each of the layers gave, and what the block added."""
        seen: dict[str, torch.Tensor] = {}
        entered: list[torch.Tensor] = []

        def keep(name: str) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
                seen[name] = output

            return hook

        def enter(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            entered.append(args[0].clone())

        with (
            hooks({block.get_submodule(name): keep(name) for name in self.writers}),
            hooks({block: enter}, before=True),
        ):
            out = self.run(block, rotated)
        idle = [name for name in self.writers if name not in seen]
        if idle:
            raise RequestError(
                f"{self.prefix}{idle[0]} did not run, so that its rotation cannot be proven; set hidden: false"
            )
        return [*(seen[name] for name in self.writers), out - entered[0]]


@torch.no_grad()
def _read_norms(modules: Mapping[str, nn.Module], norms: Iterable[str], run: Callable[[], object]) -> dict[str, str]:
    """{module: norm whose output it reads, as it is or seen in another shape}, of one run."""
    outputs: list[tuple[str, torch.Tensor]] = []  # referenced, so that an address is not used twice
    found: dict[str, str] = {}
    norms = set(norms)

    def gave(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
            outputs.append((name, output))

        return hook

    def took(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[object, ...]) -> None:
            value = args[0] if args else None
            if not isinstance(value, torch.Tensor):
                return
            for norm, output in outputs:
                if output.data_ptr() == value.data_ptr() and output.numel() == value.numel():
                    found[name] = norm

        return hook

    after = {module: gave(name) for name, module in modules.items() if name in norms}
    before = {module: took(name) for name, module in modules.items() if name not in norms}
    with hooks(after), hooks(before, before=True):
        run()
    return found
