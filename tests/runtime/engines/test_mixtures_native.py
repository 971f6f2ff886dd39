"""Mixtures of experts through the operations in C against transformers' own modules."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from llama_engines import native
from mixture_models import MIXTURES, apart, model_of
from program_families import compressed

from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.sublayers import block_bytes
from runtime.engines.native.take_over import read_engine
from runtime.engines.program.mixtures import find_mixtures, read_router
from runtime.engines.program.operations import Mixture, Routing, UnknownError
from runtime.engines.program.read import read
from runtime.engines.torch.engine import TorchEngine
from runtime.kernels.cpu import library

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

CPU = torch.device("cpu")
TEXTS = torch.randint(3, 300, (2, 70), generator=torch.Generator().manual_seed(0))
#: Numbers of experts that are unusual: a single one, all of them for every token, many more than tokens are sent to.
HOSTILE: dict[str, dict[str, Any]] = {
    "one expert": {"num_local_experts": 1, "num_experts_per_tok": 1},
    "all are chosen": {"num_local_experts": 5, "num_experts_per_tok": 5},
    "many experts": {"num_local_experts": 64, "num_experts_per_tok": 1},
}


@functools.cache
def dense(name: str) -> tuple[TorchEngine, NativeEngine]:
    model = model_of(name)
    return TorchEngine(model, CPU), native(model)


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Logits agree, and the best token, ties within 1e-3 apart."""
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    best, second = wanted.topk(2, dim=-1).values.unbind(-1)
    assert bool(((found.argmax(-1) == wanted.argmax(-1)) | (best - second < 1e-3)).all())


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_dense_mixtures(name: str) -> None:
    plain, lean = dense(name)
    check(lean.logits(TEXTS), plain.logits(TEXTS))
    assert any(isinstance(each, Mixture) for each in lean.parts.program.layers[1].operations)


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_of_compressed_mixtures(name: str) -> None:
    """Experts one by one, in 4 bits: C against dense ones of the same weights."""
    small, twin = compressed(apart(model_of(name)))
    lean = native(small)
    assert lean.parts.digits == {3}, "its layers are compressed"
    check(lean.logits(TEXTS), TorchEngine(twin, CPU).logits(TEXTS))
    check(TorchEngine(small, CPU).logits(TEXTS), TorchEngine(twin, CPU).logits(TEXTS))  # modules with experts in C


@pytest.mark.parametrize("name", ["Mixtral", "GptOss", "Glm4Moe", "Qwen2Moe"])
def test_bits_do_not_depend_on_cuts_neighbours_or_threads(name: str) -> None:
    _, lean = dense(name)
    texts = [TEXTS[0, :67].tolist(), TEXTS[1, :5].tolist(), TEXTS[1, :33].tolist()]
    alone = torch.stack([lean.step(lean.new_pages(2), [Chunk(text, 0, [1, 0])])[0] for text in texts])
    pool, pages, before = lean.new_pages(6), [[4, 2], [0, 5], [3, 1]], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            chunks = [Chunk(text, 0, mine) for text, mine in zip(texts, pages, strict=True)]
            assert torch.equal(lean.step(pool, chunks), alone)
            lean.step(pool, [Chunk(text[:-1], 0, mine) for text, mine in zip(texts, pages, strict=True)])
            ends = [Chunk([text[-1]], len(text) - 1, mine) for text, mine in zip(texts, pages, strict=True)]
            assert torch.equal(lean.step(pool, ends), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_unusual_numbers_of_experts(changes: dict[str, Any]) -> None:
    model = model_of("Mixtral", **changes)
    plain, lean = TorchEngine(model, CPU), native(model)
    for texts in (TEXTS, TEXTS[:1, :1]):
        check(lean.logits(texts), plain.logits(texts))


def test_an_expert_that_no_token_is_sent_to() -> None:
    model = model_of("GptOss")
    for layer in model.model.layers:
        layer.mlp.router.bias.data[2] = -1e4
        layer.mlp.experts.down_proj.data[2] = float("nan")  # nobody reads it
    found = native(model).logits(TEXTS)
    check(found, TorchEngine(model, CPU).logits(TEXTS))
    assert not found.isnan().any()


def test_a_nan_in_a_router_reaches_the_logits_of_tokens_as_with_modules() -> None:
    model = model_of("Mixtral")
    lean, plain = native(model), TorchEngine(model, CPU)
    model.model.layers[1].mlp.gate.weight.data[3] = float("nan")
    assert lean.logits(TEXTS).isnan().all()
    assert plain.logits(TEXTS).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_mixtures(dtype: torch.dtype) -> None:
    model = model_of("Mixtral", num_local_experts=2).to(dtype)  # both are chosen: rounding changes no choice
    exact = TorchEngine(model_of("Mixtral", num_local_experts=2).to(dtype).float(), CPU).logits(TEXTS)
    theirs, ours = TorchEngine(model, CPU).logits(TEXTS), native(model).logits(TEXTS)
    assert float((ours - exact).norm()) <= 1.1 * float((theirs - exact).norm())


# ---------------------------------------------------------------- routers
def routing(name: str, **changes: Any) -> Routing:
    model = model_of(name, **changes)
    router = list(find_mixtures(model).values())[-1]
    return read_router(router, model.get_submodule(router))


def test_rules_of_routers_are_seen() -> None:
    assert routing("Mixtral").score == "chosen"  # a softmax over all, made to add up to one, is one over the chosen
    assert routing("Qwen3Moe").score == "softmax"
    assert routing("Qwen3Moe, weights of one").score == "chosen"
    assert routing("GptOss").bias == "bias"
    found = routing("Glm4Moe")
    assert (found.score, found.groups, found.best, found.normalize, found.scale) == ("sigmoid", 4, 2, True, 2.5)
    assert found.correction == "e_score_correction_bias"
    assert not routing("Glm4Moe", norm_topk_prob=False).normalize


def test_other_rules_are_refused() -> None:
    model = model_of("Mixtral")
    router = model.model.layers[1].mlp.gate

    class Squared(type(router)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> Any:
            logits, weights, index = super().forward(hidden_states)
            return logits, weights.square(), index

    router.__class__ = Squared
    with pytest.raises(UnknownError, match=r"gate, a Squared, chooses experts by a rule"):
        read_router("gate", router)
    assert "chooses experts by a rule that operations do not know" in str(read(model))


def test_weights_that_are_changed_after_the_router_are_refused() -> None:
    model = model_of("Mixtral")
    mixture = model.model.layers[0].mlp

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, 1)
        _, weights, index = mixture.gate(rows)
        return mixture.experts(rows, index, weights / 2).view(hidden.shape)

    mixture.forward = forward
    assert "is not given just what a router chose" in str(read(model))


def test_an_activation_that_experts_in_c_do_not_know_is_refused() -> None:
    model = model_of("Mixtral", hidden_act="gelu")
    assert "has a gate that operations do not know" in str(read_engine(TorchEngine(model, CPU)))


def test_bytes_of_a_token_count_only_the_chosen_experts() -> None:
    small, _ = compressed(apart(model_of("Mixtral")))
    lean = native(small)
    layer, mixture = small.model.layers[0], small.model.layers[0].mlp
    others = sum(
        getattr(layer.self_attn, f"{p}_proj").in_features * getattr(layer.self_attn, f"{p}_proj").out_features
        for p in "qkvo"
    )
    expected = others / 2 + 2 * 3 * 72 * 40 / 2 + 4 * mixture.gate.weight.numel()
    assert block_bytes(lean.parts.blocks[0]) == pytest.approx(expected)
