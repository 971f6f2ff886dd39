"""Gates: what they mean, and that training finds the head that looks back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_models import VOCABULARY, llama, rows

from compress.kv_cache import attention
from compress.kv_cache import gates as gradients
from compress.kv_cache.attention import AttentionCall, watching
from compress.kv_cache.calibrate import CalibrationOptions
from compress.kv_cache.gates import GatedAttention, GateOptions, Passkeys
from compress.kv_cache.statistics import hidden_states
from compress.kv_cache.view import CalibrationView
from runtime.errors import RequestError

OPTIONS = GateOptions(sinks=2, recent=6, length=96, steps=40, rate=0.1, window=8)


def _trained(model: Any, ids: torch.Tensor, options: GateOptions | None, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Gates `[layer][kv_head]`, and facts of their training."""
    view = CalibrationView(model, None, ids, None, CalibrationOptions(options), seed=seed)
    return gradients.calibrate(view)["gates"]


def _states(model: Any, ids: torch.Tensor, gates: torch.Tensor | None, sinks: int = 2, recent: int = 6) -> torch.Tensor:
    with torch.no_grad(), watching(model, GatedAttention(gates, sinks, recent)):
        return hidden_states(model, ids)


def _one_head_looks_back() -> Any:
    """Only the first key head has an effect: it attends to tokens like the present one, wherever they are."""
    model = llama(num_hidden_layers=1)
    own = model.model.layers[0].self_attn
    own.o_proj.weight[:, 32:] = 0  # query heads 2 and 3, of the second key head
    own.q_proj.weight.copy_(own.k_proj.weight.view(2, 16, 32).repeat_interleave(2, 0).reshape(64, 32))
    own.q_proj.weight *= 4
    return model


def test_open_gates_are_the_model() -> None:
    model, ids = llama(), rows(3)
    with torch.no_grad():
        expected = hidden_states(model, ids)
    assert torch.equal(_states(model, ids, None), expected)
    assert torch.equal(_states(model, ids, torch.ones(2, 2)), expected)


@pytest.mark.parametrize("size", [5, 16, 256])
@pytest.mark.parametrize(("sinks", "recent"), [(2, 6), (0, 3), (10, 1), (4, 100)])
def test_closed_gates_are_attention_under_the_streaming_mask(
    sinks: int, recent: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SLICE", size)
    model, ids = llama(), rows(2, 40)
    place = torch.arange(40)
    age = place[:, None] - place
    mask = (age >= 0) & ((age < recent) | (place < sinks))
    with torch.no_grad():
        expected = model.model(ids, attention_mask=mask.expand(2, 1, 40, 40)).last_hidden_state
    torch.testing.assert_close(_states(model, ids, torch.zeros(2, 2), sinks, recent), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_capped_scores_and_sliced_attention(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SLICE", 7)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 20, 8, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(0, query, key, value, None, 0.5, softcap)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    future = torch.ones(20, 20, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(future, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(call.full(), expected)
    torch.testing.assert_close(call.streaming(0, 20), expected)
    torch.testing.assert_close(call.streaming(20, 1), expected)


def test_layers_with_a_window_of_their_own_have_no_gates() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=VOCABULARY, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        attn_implementation="sdpa", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval().requires_grad_(False)
    ids = rows(2)
    with torch.no_grad():
        expected = hidden_states(model, ids)
    torch.testing.assert_close(_states(model, ids, torch.ones(1, 2)), expected)
    assert not torch.allclose(_states(model, ids, torch.zeros(1, 2)), expected)


def test_training_finds_the_head_that_looks_back() -> None:
    model = _one_head_looks_back()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gates, facts = _trained(model, rows(), OPTIONS)
    (retrieval, streaming), *others = gates
    assert not others
    assert all(0 <= gate <= 1 for gate in (retrieval, streaming))
    assert retrieval > 0.6
    assert streaming < 0.1
    assert sum(facts["histogram"]) == 2
    assert facts["losses"][-1] < 0.1  # 1 where all stream
    assert facts["recall"]["half"] == facts["recall"]["full"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    again, others = _trained(model, rows(), OPTIONS)
    assert (again, others["losses"]) == (gates, facts["losses"])
    assert _trained(model, rows(), OPTIONS, seed=1)[1]["losses"] != facts["losses"]


def test_loss_falls_from_closed_gates() -> None:
    """Without the penalty, gates that begin closed open: gradients reach every layer."""
    model, ids = llama(), rows(4, 64)
    gates = torch.zeros(2, 2, requires_grad=True)
    target = _states(model, ids, None)
    losses = []
    optimizer = torch.optim.Adam([gates], lr=0.1)
    with watching(model, GatedAttention(gates, 2, 6)):
        for _ in range(15):
            loss = (hidden_states(model, ids) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert float(gates.detach().min()) > 0.5


def test_models_of_few_positions_are_trained_with_a_smaller_window() -> None:
    gates, facts = _trained(_one_head_looks_back(), rows(), GateOptions(steps=30, rate=0.1))
    assert facts["length"] == 128
    assert facts["window"] == [8, 24]
    assert gates[0][0] > gates[0][1]


def test_blocks_computed_anew_give_the_same_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, short = llama(), replace(OPTIONS, steps=3)
    expected, _ = _trained(model, rows(), short)
    monkeypatch.setattr(gradients, "KEEP", 0)
    calls: list[bool] = []
    forward = type(model.model.layers[0]).forward
    monkeypatch.setattr(
        type(model.model.layers[0]),
        "forward",
        lambda *a, **k: calls.append(torch.is_grad_enabled()) or forward(*a, **k),
    )
    found, _ = _trained(model, rows(), short)
    assert sum(calls) == 2 * 3 * 2  # forward and again, steps, layers
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    assert not any("forward" in vars(module) for module in model.modules())


def test_rows_that_tell_nothing_are_refused() -> None:
    with pytest.raises(RequestError, match="rows of 128"):
        _trained(llama(), rows(), GateOptions(sinks=16, recent=64, length=128))
    with pytest.raises(RequestError, match="rows of 12"):
        _trained(llama(max_position_embeddings=12), rows(), None)
    with pytest.raises(RequestError, match="128"):
        _trained(llama(), rows(), GateOptions(sinks=2, recent=6, length=256))
    with pytest.raises(RequestError, match="16"):
        _trained(llama(), torch.ones(2, 64, dtype=torch.int64), OPTIONS)


def test_passkeys_are_asked_for_at_the_end() -> None:
    data = Passkeys.of(rows(), None, 96)
    ids, asked = data.draw(3, torch.Generator().manual_seed(0))
    again, _ = data.draw(3, torch.Generator().manual_seed(0))
    assert torch.equal(ids, again)
    assert ids.shape == asked.shape == (3, 96)
    tail = data.keys * (2 + data.key_tokens)
    for row, mask in zip(ids.tolist(), asked, strict=True):
        assert int(mask.sum()) == data.keys * data.key_tokens
        assert not mask[: 96 - tail + 1].any()
        text, question = row[: 96 - tail], row[96 - tail :]
        for index in range(data.keys):
            key = question[index * (2 + data.key_tokens) : (index + 1) * (2 + data.key_tokens)]
            assert any(text[place : place + len(key)] == key for place in range(len(text)))
            place = 96 - tail + index * (2 + data.key_tokens)
            assert mask[
                place + 1 : place + 1 + data.key_tokens
            ].all()  # each token of the key is predicted by the one before


def test_a_tokenizer_names_the_keys(bundled: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(bundled))
    ids, _ = Passkeys.of(torch.arange(2, 600).view(2, -1), tokenizer, 512).draw(1, torch.Generator().manual_seed(0))
    assert ids.shape == (1, 512)
    assert tokenizer.decode(ids[0]).count("The first key is:") == 2


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    def forward() -> None:
        with watching(model, lambda call: call.full()):
            model.set_attn_implementation("eager")  # what such a model does
            hidden_states(model, rows(1))

    model = llama()
    with pytest.raises(RequestError, match="LlamaForCausalLM"):
        forward()
