"""Routed experts, one by one: transformers 5 holds those of a layer in two or three tensors, where no single one can be compressed.

What the tensors of such a module mean, it says itself (`transformers.integrations.moe.use_experts_implementation`): whether experts have a
gate, biases, and which way round the matrices are. So no family is named here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import nn

_SAYS = ("has_gate", "has_bias", "is_transposed", "_apply_gate")


@dataclass(frozen=True)
class Layout:
    """How one module holds its experts.

    Attributes:
        count: of experts. hidden, inner: what an expert reads, and the width between its two products.
        gate: `gate_up_proj` holds gate and up projection; without one there is `up_proj` alone.
        interleaved: rows of gate and up take turns; otherwise all of the gate's come first.
        transposed: tensors are `[experts, in, out]`, and not `[experts, out, in]`.
        bias: every projection has one, `[experts, out]`.
        dtype: of the tensors.
    """

    count: int
    hidden: int
    inner: int
    gate: bool
    interleaved: bool
    transposed: bool
    bias: bool
    dtype: torch.dtype

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of an expert's linear layers, in the order they run."""
        return ("gate_proj", "up_proj", "down_proj") if self.gate else ("up_proj", "down_proj")

    def home(self, projection: str, bias: bool = False) -> str:
        """Name of the tensor that holds a projection of all experts."""
        name = "gate_up_proj" if self.gate and projection != "down_proj" else projection
        return f"{name}_bias" if bias else name

    def shape(self, projection: str, bias: bool = False) -> tuple[int, ...]:
        """Of `home`."""
        down = projection == "down_proj"
        out, into = (self.hidden, self.inner) if down else (self.inner * (1 + self.gate), self.hidden)
        if bias:
            return (self.count, out)
        return (self.count, into, out) if self.transposed else (self.count, out, into)

    def part(self, projection: str, held: torch.Tensor, bias: bool = False) -> torch.Tensor:
        """What one expert has of `home`: `held` is `[in, out]` or `[out, in]` (a bias `[out]`), the result `[out, in]` (`[out]`)."""
        rows = held if bias or not self.transposed else held.T
        if self.gate and projection != "down_proj":
            second = projection == "up_proj"
            if self.interleaved:
                rows = rows[int(second) :: 2]
            else:
                rows = rows[self.inner :] if second else rows[: self.inner]
        return rows.contiguous()

    def join(self, projection: str, held: Sequence[torch.Tensor], bias: bool = False) -> torch.Tensor:
        """What one expert has of `home`, out of its own `[out, in]` (biases `[out]`). Undoes `part`."""
        if len(held) == 1:
            rows = held[0]
        else:
            rows = torch.stack(list(held), 1).flatten(0, 1) if self.interleaved else torch.cat(list(held))
        return (rows if bias or not self.transposed else rows.T).contiguous()


def layout_of(module: nn.Module) -> Layout | None:
    """How `module` holds experts; None: it holds none, or in a way that it does not say."""
    if not all(hasattr(module, name) for name in _SAYS):
        return None
    wide: Any = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    down: Any = getattr(module, "down_proj", None)
    if not all(isinstance(value, nn.Parameter) and value.dim() == 3 for value in (wide, down)):
        return None
    count, inner, hidden = (int(n) for n in (down.shape if module.is_transposed else down.mT.shape))
    gate, transposed = bool(module.has_gate), bool(module.is_transposed)
    interleaved = _interleaved(module, inner) if gate else False
    layout = Layout(count, hidden, inner, gate, interleaved, transposed, bool(module.has_bias), wide.dtype)
    return layout if tuple(wide.shape) == layout.shape("up_proj") else None


def _interleaved(module: Any, inner: int) -> bool:
    """Whether the second output of a `gate_up_proj` counts for the first unit: asked of what computes the gate."""
    given = torch.linspace(0.1, 0.2, 2 * inner, device="cpu")[None]
    other = given.clone()
    other[0, 1] += 0.05
    changed = (module._apply_gate(given) != module._apply_gate(other))[0].nonzero().flatten().tolist()
    return bool(changed == [0])


def experts_layout(module: nn.Module) -> Layout | None:
    """How a module holds experts, in one or as `Experts`; None: it holds none."""
    return module.layout if isinstance(module, Experts) else layout_of(module)


def find_fused(model: nn.Module) -> dict[str, Layout]:
    """{name: how it holds experts} of all modules of a model that do."""
    found = {name: layout_of(module) for name, module in model.named_modules()}
    return {name: layout for name, layout in found.items() if layout is not None}


@dataclass(frozen=True)
class Gate:
    """What stands between an expert's two products.

    Attributes:
        kind: "silu", `silu(gate) * up`; "clamped", `(up + 1) * gate * sigmoid(alpha * gate)` of a gate of at most `limit` and an up
            projection within it (gpt-oss); "none": there is no gate, but `silu(up)`.
    """

    kind: str
    alpha: float = 0.0
    limit: float = 0.0


def gate_of(module: nn.Module) -> Gate | None:
    """The gate of a module that holds experts (or of `Experts`), found by trying it; None: it is none of these."""
    layout = experts_layout(module)
    fused: Any = module.__dict__["_fused"] if isinstance(module, Experts) else module
    if layout is None or getattr(fused, "has_post_expert_norm", False):
        return None
    generator = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, 4, layout.inner, generator=generator) * torch.tensor([0.1, 1, 5, 40])[:, None]
    with torch.no_grad():
        if not layout.gate:
            same = torch.allclose(fused.act_fn(up), nn.functional.silu(up), rtol=1e-5, atol=1e-6)
            return Gate("none") if same else None
        given = torch.stack((gate, up), -1).flatten(-2) if layout.interleaved else torch.cat((gate, up), -1)
        found = fused._apply_gate(given)
    alpha, limit = (float(getattr(fused, name, None) or 1.0) for name in ("alpha", "limit"))
    held, bounded = gate.clamp(max=limit), up.clamp(-limit, limit)
    for made, value in (
        (Gate("silu"), nn.functional.silu(gate) * up),
        (Gate("clamped", alpha, limit), (bounded + 1) * held * torch.sigmoid(held * alpha)),
    ):
        if torch.allclose(found, value, rtol=1e-5, atol=1e-6):
            return made
    return None


class Expert(nn.Module):
    """One of them: `down_proj(gate(gate_proj(x), up_proj(x)))`.

    Attributes:
        tokens: which rows of what its layer was given are being computed, `[n]` int64; None: all of them, or nothing is.
    """

    def __init__(self, layout: Layout, device: Any) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": layout.bias, "device": device, "dtype": layout.dtype}
        for name in layout.projections:
            sides = (layout.inner, layout.hidden) if name == "down_proj" else (layout.hidden, layout.inner)
            self.add_module(name, nn.Linear(*sides, **options))
        self.tokens: torch.Tensor | None = None


class Experts(nn.ModuleList):
    """Takes the place of a module that holds its experts in one: the same products, each expert's of its own linear layers.

    What the experts of a token give is summed in float32.

    Attributes:
        layout: of the module whose place it takes.
        everyone: numbers of the experts that are to read all tokens, wherever the router sends them; what the layer gives stays the same.
            Calibration asks for it where the text sends an expert too little.
        separate: each of these reads a tensor of its own, so that who watches sees inputs that are not shared.
        compute: asked first at every call, with the module and the arguments of `forward`: what the layer gives, or None, and then the
            experts run one after the other. None: there is nothing to ask.
    """

    def __init__(self, fused: nn.Module, layout: Layout) -> None:
        device = fused.get_parameter("down_proj").device
        super().__init__(Expert(layout, device) for _ in range(layout.count))
        self.layout = layout
        self.everyone: set[int] = set()
        self.separate = False
        self.compute: Callable[..., torch.Tensor | None] | None = None
        biases = (False, True) if layout.bias else (False,)
        for name in {layout.home(p, bias) for p in layout.projections for bias in biases}:
            fused._parameters.pop(name)
        # It knows the gate. What is left of it that has weights is registered under its own name.
        self.__dict__["_fused"] = fused
        for name, child in fused.named_children():
            self.add_module(name, child)
        for name, parameter in fused._parameters.items():
            self.register_parameter(name, parameter)

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.layout.count

    def one_by_one(self) -> list[nn.Module]:
        """The experts, without what else the module may hold."""
        return [self[number] for number in range(self.count)]

    def whole(self, key: str, read: Callable[[nn.Module, str], torch.Tensor | None]) -> torch.Tensor | None:
        """The tensor `key` of all experts, as a module holds it that has them in one; None: there is no such tensor.

        Args:
            read: gives "weight" or "bias" of an expert's linear layer, `[out, in]` or `[out]`.
        """
        bias = key.endswith("_bias")
        own = [p for p in self.layout.projections if self.layout.home(p, bias) == key]
        if not own or (bias and not self.layout.bias):
            return None
        experts = []
        for number in range(self.count):
            held = [read(self[number].get_submodule(p), "bias" if bias else "weight") for p in own]
            if any(part is None for part in held):
                return None
            experts.append(self.layout.join(own[0], [part for part in held if part is not None], bias))
        return torch.stack(experts)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """`[tokens, hidden]` of the same, the experts `[tokens, k]` int64 of each token, and their weights `[tokens, k]`."""
        together = None
        if self.compute is not None:
            together = self.compute(self, hidden_states, top_k_index, top_k_weights)
        if together is not None:
            return together
        total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        chosen, order = torch.sort(top_k_index.flatten(), stable=True)
        bounds = torch.searchsorted(chosen, torch.arange(self.count + 1, device=chosen.device)).tolist()
        weights = top_k_weights.flatten()
        for number in range(self.count):
            pairs = order[bounds[number] : bounds[number + 1]]
            tokens = pairs // top_k_index.shape[1]
            if number in self.everyone:
                given = self.run(number, hidden_states.clone() if self.separate else hidden_states)[tokens]
            elif len(pairs):
                given = self.run(number, hidden_states[tokens], tokens)
            else:
                continue
            total.index_add_(0, tokens, given.float() * weights[pairs, None].float())
        return total.to(hidden_states.dtype)

    def run(self, number: int, rows: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """What one expert makes of `rows` `[n, hidden]`; `tokens` says which ones of the layer they are."""
        expert: Any = self[number]
        expert.tokens = tokens
        fused: Any = self.__dict__["_fused"]
        try:
            up = expert.up_proj(rows)
            if self.layout.gate:
                both = (expert.gate_proj(rows), up)
                inner = fused._apply_gate(
                    torch.stack(both, -1).flatten(-2) if self.layout.interleaved else torch.cat(both, -1)
                )
            else:
                inner = fused.act_fn(up)
            out: torch.Tensor = expert.down_proj(inner)
            if getattr(fused, "has_post_expert_norm", False):
                norm: Any = self.post_expert_norm
                out = norm(out)
            return out
        finally:
            expert.tokens = None


def unfuse(model: nn.Module, names: Collection[str] | None = None) -> list[str]:
    """Give modules that hold experts in one (all, or `names`) their experts one by one; names of those that were changed.

    Weights are not moved: the new layers are empty, on the device of what they replace (meta, in a skeleton).
    """
    done = []
    for name, layout in find_fused(model).items():
        if names is not None and name not in names:
            continue
        model.set_submodule(name, Experts(model.get_submodule(name), layout))
        done.append(name)
    return done


def routers(model: nn.Module) -> set[str]:
    """Names of the linear layers that choose or weigh experts: beside the experts in their layer, with one output or one for each.

    Layers of an expert that all tokens share are none, though they may be as wide as there are experts.
    """
    found = set()
    for name, module in model.named_modules():
        layout = experts_layout(module)
        if layout is None:
            continue
        home = name.rpartition(".")[0]
        for own, child in model.get_submodule(home).named_modules(prefix=home):
            if own == name or own.startswith(f"{name}.") or not isinstance(child, nn.Linear):
                continue
            parent = own.rpartition(".")[0]
            shared = parent != home and _is_feed_forward(model.get_submodule(parent), layout.hidden)
            if child.out_features in (1, layout.count) and not shared:
                found.add(own)
    return found


def _is_feed_forward(module: nn.Module, hidden: int) -> bool:
    """Whether one of its linear layers reads the hidden state, and another makes one of what that gives."""
    layers = [child for child in module.children() if isinstance(child, nn.Linear)]
    return any(
        wide.in_features == narrow.out_features == hidden and wide.out_features == narrow.in_features
        for wide, narrow in permutations(layers, 2)
    )


def expert_of(model: nn.Module, name: str) -> tuple[str, int] | None:
    """(module with experts, number) of the expert that module `name` belongs to; None: it belongs to none."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        home = ".".join(parts[:end])
        if parts[end].isdecimal() and isinstance(model.get_submodule(home), Experts):
            return home, int(parts[end])
    return None
