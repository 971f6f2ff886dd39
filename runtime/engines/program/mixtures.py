"""Routers of mixtures of experts: which module chooses for which experts, and by which rule, found by trying it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from runtime.engines.program.operations import Routing, UnknownError
from runtime.modeling.experts import experts_layout
from runtime.modeling.linear_modules import is_matrix

if TYPE_CHECKING:
    from runtime.modeling.experts import Layout

_ROWS = 48  # tokens of a trial
EPSILON = 1e-20  # of DeepSeek's sums of sigmoids


def find_mixtures(model: nn.Module) -> dict[str, str]:
    """{module that holds experts: the module beside it that chooses among them}; without an entry where it is none, or two may be."""
    found = {}
    for name, module in model.named_modules():
        layout = experts_layout(module)
        if layout is None:
            continue
        home = name.rpartition(".")[0]
        beside = [
            f"{home}.{own}" for own, child in model.get_submodule(home).named_children() if _may_choose(child, layout)
        ]
        if len(beside) == 1:
            found[name] = beside[0]
    return found


def _may_choose(module: nn.Module, layout: Layout) -> bool:
    weight = module._parameters.get("weight")
    return not is_matrix(module) and weight is not None and tuple(weight.shape) == (layout.count, layout.hidden)


_twins: dict[tuple[Any, ...], nn.Module] = {}


def twin_of(router: nn.Module) -> nn.Module:
    """A router of the same rule with random weights, on the CPU: what it gives has the same form."""
    facts = {name: value for name, value in vars(router).items() if isinstance(value, bool | int | float | str)}
    tensors = {name: tuple(each.shape) for name, each in (*router.named_parameters(), *router.named_buffers())}
    key = (type(router), tuple(sorted(facts.items())), tuple(sorted(tensors.items())))
    if key not in _twins:
        generator = torch.Generator().manual_seed(0)
        twin = copy.deepcopy(router).to_empty(device="cpu").float().eval()
        for each in (*twin.parameters(), *twin.buffers()):
            wide = each.shape[-1] ** 0.5 if each.dim() > 1 else 4.0
            each.data = torch.randn(each.shape, generator=generator) * 1.5 / wide
        _twins[key] = twin
    return _twins[key]


def outputs_of(found: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int64 `[tokens, k]` and their weights `[tokens, k]` in what a router gave."""
    tensors = [each for each in found if isinstance(each, torch.Tensor)] if isinstance(found, tuple) else []
    index = [each for each in tensors if each.dtype in (torch.int64, torch.int32)]
    weights = [each for each in tensors if index and each.is_floating_point() and each.shape == index[0].shape]
    if len(index) != 1 or not weights:
        raise UnknownError(f"{name} gives no experts of each token and weights of these")
    return index[0], weights[-1]  # logits come first, where there are as many experts as are chosen


@torch.no_grad()
def read_router(name: str, router: nn.Module) -> Routing:
    """The rule of a router, seen in numbers: its twin chooses among experts for random rows.

    Raises:
        UnknownError: it is none that operations know.
    """
    twin = twin_of(router)
    weight = twin.get_parameter("weight")
    rows = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(1))
    index, weights = outputs_of(twin(rows), name)
    vectors = {
        n: each for n, each in (*twin.named_parameters(), *twin.named_buffers()) if tuple(each.shape) == (len(weight),)
    }
    if len(vectors) + 1 < sum(1 for _ in (*twin.parameters(), *twin.buffers())):
        raise UnknownError(f"{name}, a {type(router).__name__}, has weights beside those of its logits")
    for rule in _rules(name, twin, index.shape[1], vectors):
        bias = vectors.get(rule.bias or "")
        logits = rows @ weight.T + (0.0 if bias is None else bias)
        own_index, own = choose(logits, rule, vectors.get(rule.correction or ""))
        order, own_order = index.argsort(1), own_index.argsort(1)
        if not torch.equal(index.gather(1, order), own_index.gather(1, own_order)):
            continue
        wanted, own = weights.float().gather(1, order), own.gather(1, own_order)
        scale = float((wanted * own).sum() / own.square().sum())
        if torch.allclose(own * scale, wanted, rtol=1e-4, atol=1e-6):
            return replace(rule, scale=1.0 if abs(scale - 1) < 1e-5 else round(scale, 6))
    raise UnknownError(f"{name}, a {type(router).__name__}, chooses experts by a rule that operations do not know")


def _rules(name: str, twin: nn.Module, chosen: int, vectors: dict[str, torch.Tensor]) -> Iterator[Routing]:
    """Rules to be tried: every score, groups of experts of a number that the router holds, and every part for its vectors."""
    count = len(twin.get_parameter("weight"))
    numbers = {n: v for n, v in vars(twin).items() if "group" in n and type(v) is int}
    groups = [
        (1, 1),
        *((a, b) for a, b in product(numbers.values(), repeat=2) if a > 1 and count % a == 0 and 0 < b < a),
    ]
    parts: list[tuple[str | None, str | None]] = [(None, None)] if not vectors else []
    for own in vectors:
        other = next((each for each in vectors if each != own), None)
        parts += [(own, other), (other, own)] if len(vectors) <= 2 else []
    for (bias, correction), (amount, best), score in product(
        parts, dict.fromkeys(groups), ("softmax", "chosen", "sigmoid")
    ):
        for normalize in (False, True) if score == "sigmoid" else (False,):
            yield Routing(name, score, chosen, amount, best, normalize, EPSILON, 1.0, bias, correction)


def choose(logits: torch.Tensor, rule: Routing, correction: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights `[tokens, chosen]` by a rule, as experts.h computes them."""
    scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid() if rule.score == "sigmoid" else logits
    ranks = scores if correction is None else scores + correction
    if rule.groups > 1:
        parts = ranks.unflatten(-1, (rule.groups, -1))
        best = parts.topk(min(2, parts.shape[-1]), -1)[0].sum(-1).topk(rule.best, -1)[1]
        out = torch.ones(parts.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
        ranks = parts.masked_fill(out[..., None], -torch.inf).flatten(-2)
    index = ranks.topk(rule.chosen, -1)[1]
    weights = scores.gather(-1, index)
    if rule.score == "chosen":
        weights = weights.softmax(-1)
    if rule.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + rule.epsilon)
    return index, weights * rule.scale
