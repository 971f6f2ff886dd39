"""Experts of a layer: what their router sends them, added up by hand; which stay; which models say too little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from compress.model.config_sizes import active_experts, resized, size_of
from compress.model.couplings import Slices, changed
from compress.prune.structure import METHODS
from compress.prune.structure.experts import Call, add_routing, experts_of
from compress.prune.structure.method import Routing, View
from compress.prune.structure.removal import best
from runtime.errors import CompressError, RequestError
from runtime.modeling.skeleton import build_skeleton


class Experts(nn.Module):
    """Four experts; each multiplies by its matrix."""

    def __init__(self, count: int = 4, hidden: int = 3) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(count, hidden, hidden))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any, scale: float = 1.0) -> torch.Tensor:
        each = torch.stack([hidden_states @ matrix.T for matrix in self.matrices], 1)
        return scale * (each.gather(1, top_k_index[..., None].expand(-1, -1, 3)) * top_k_weights[..., None]).sum(1)


@pytest.fixture
def call() -> tuple[Experts, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    index = torch.tensor([[0, 1], [1, 2], [1, 0], [2, 1], [0, 2], [1, 0]])
    return Experts(), torch.randn(6, 3), index, torch.rand(6, 2)


@pytest.mark.parametrize("masked", [False, True])
def test_what_experts_are_sent_and_give_is_added_up(call: Any, masked: bool) -> None:
    module, hidden, index, weights = call
    mask = torch.tensor([[True, True, False], [True, False, True]]) if masked else None
    found = Routing.none(4)
    with torch.no_grad():
        given = {"top_k_weights": weights, "top_k_index": index}
        add_routing(found, module, Call.of(module, (hidden,), given), mask, outputs=True)
        add_routing(found, module, Call.of(module, (hidden, index, weights), {"scale": 2.0}), mask, outputs=True)
    used, weight, output = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    real = [0, 1, 3, 5] if masked else range(6)
    for token in real:
        for place in range(2):
            expert = int(index[token, place])
            used[expert] += 2
            weight[expert] += 2 * weights[token, place]
            output[expert] += 3 * weights[token, place] * (module.matrices[expert] @ hidden[token]).norm()
    assert found.tokens == 2 * len(real)
    torch.testing.assert_close(found.used, used)
    torch.testing.assert_close(found.weight, weight)
    torch.testing.assert_close(found.output, output)


def test_a_call_can_be_sent_elsewhere(call: Any) -> None:
    module, hidden, index, weights = call
    arguments, keywords = Call.of(
        module, (), {"top_k_index": index, "hidden_states": hidden, "top_k_weights": weights}
    ).sent(index.flip(1), weights)
    torch.testing.assert_close(module(*arguments, **keywords), module(hidden, index.flip(1), weights))
    with pytest.raises(CompressError, match="indices"):
        Call.of(module, (hidden, weights, index), {})


def test_rankings_are_what_they_say() -> None:
    routing = Routing(10, torch.tensor([4.0, 0.0, 8.0]), torch.tensor([2.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 6.0]))
    view = View(3, 2, torch.Generator(), routing=routing)
    for name, expected in (("routing", [0.2, 0.0, 0.1]), ("reap", [0.5, 0.0, 0.75])):
        method = METHODS[name]
        assert method.rank(view, method.config.model_validate({"method": name, "keep": 2})).tolist() == pytest.approx(
            expected
        )


def test_of_groups_as_many_stay_in_each() -> None:
    importance = torch.tensor([9.0, 8, 7, 6, 1, 2, 3, 4])
    assert best(importance, 4, 1).tolist() == [0, 1, 2, 3]
    assert best(importance, 4, 2).tolist() == [0, 1, 6, 7]
    assert best(importance, 4, 4).tolist() == [0, 2, 5, 7]
    assert best(torch.ones(6), 3, 1).tolist() == [0, 1, 2]


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3}, (8, 3, 1)),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2}, (8, 2, 1)),
        ("ernie4_5_moe", {"moe_num_experts": 8, "moe_k": 2}, (8, 2, 1)),
        ("deepseek_v3", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 6}, (16, 12, 4)),
        ("deepseek_v3", {"n_routed_experts": 16, "n_group": 4, "topk_group": 4, "num_experts_per_tok": 4}, (16, 8, 4)),
        ("deepseek_v2", {"n_routed_experts": 16, "n_group": None, "num_experts_per_tok": 4}, (16, 4, 1)),
    ],
)
def test_sizes(family: str, fields: dict[str, Any], expected: tuple[int, int, int]) -> None:
    size = size_of(AutoConfig.for_model(family, **SMALL, **fields), "experts")
    assert (size.count, size.least, size.groups) == expected


def test_sizes_that_are_not_said() -> None:
    with pytest.raises(RequestError, match="experts"):
        size_of(AutoConfig.for_model("llama", **SMALL), "experts")
    with pytest.raises(RequestError, match="experts"):
        size_of(AutoConfig.for_model("mixtral", **SMALL, num_local_experts=1), "experts")
    uneven = AutoConfig.for_model("deepseek_v3", **SMALL, n_routed_experts=16, n_group=3, topk_group=1)
    with pytest.raises(RequestError, match="16 experts in 3 groups"):
        size_of(uneven, "experts")
    config = AutoConfig.for_model("mixtral", **SMALL, num_local_experts=8)
    with pytest.raises(RequestError, match="2 to 8"):
        resized(config, "experts", 1)
    assert active_experts(config) == 2


def _slices(family: str, **fields: Any) -> tuple[Any, list[Slices]]:
    config = AutoConfig.for_model(family, **SMALL, **fields)
    models = [build_skeleton(c, torch.float32) for c in (config, resized(config, "experts", 3))]
    return models[0], changed(models[0], models[1], 4, 3)


def test_the_module_that_holds_the_experts_is_found() -> None:
    model, slices = _slices("qwen2_moe", num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0])
    assert experts_of(model, slices, "model.layers.0.") == ()
    (found,) = experts_of(model, slices, "model.layers.1.")
    assert (found.module, found.around) == ("model.layers.1.mlp.experts", "model.layers.1.mlp")
    assert {s.name.removeprefix("model.layers.1.mlp.") for s in found.slices} == {
        "gate.weight", "experts.gate_up_proj", "experts.down_proj",
    }  # fmt: skip


def test_experts_that_are_not_told_who_is_sent_to_them() -> None:
    model, slices = _slices(
        "llama4_text", num_local_experts=4, num_experts_per_tok=2, intermediate_size_mlp=48, head_dim=16
    )
    with pytest.raises(RequestError, match="Llama4TextExperts"):
        experts_of(model, slices, "model.layers.1.")
