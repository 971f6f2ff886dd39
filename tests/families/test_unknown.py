"""An architecture that nobody has prepared for: it works, or `plan` says what of it was not found."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer
from odd_architecture import Cell, OddConfig, OddForCausalLM
from transformers import AutoConfig, AutoModelForCausalLM

import compress
import runtime
from compress.recipe import load
from compress.run.plan import make_plan
from runtime.errors import CompressError, RequestError

W4 = {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    AutoConfig.register("oddformer", OddConfig)
    AutoModelForCausalLM.register(OddConfig, OddForCausalLM)
    yield
    CONFIG_MAPPING._extra_content.pop("oddformer")
    MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(OddConfig)


def recipe(path: Path, tmp_path: Path, *stages: dict[str, Any], **config: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    OddForCausalLM(OddConfig(eos_token_id=256, pad_token_id=256, **config)).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(200)))
    calibration = {"data": str(text), "samples": 8, "sequence_length": 32, "batch_size": 4}
    return {"name": "test", "model": str(path), "calibration": calibration, "stages": list(stages)}


def test_an_unknown_architecture_works(tmp_path: Path) -> None:
    stages = {"prune": {"method": "sparsegpt", "pattern": "2:4"}}, W4
    request = recipe(tmp_path / "model", tmp_path, *stages)
    artifact = compress.apply(request, output=tmp_path / "out", quiet=True)
    names = {layer["name"] for layer in artifact.manifest["layers"]}
    cells = range(2)
    assert names == {f"trunk.cells.{i}.{leaf}" for i in cells for leaf in ("read", "tell", "widen", "narrow")}
    theirs = AutoModelForCausalLM.from_pretrained(artifact.path).eval()
    model = runtime.load(artifact.path)
    ids = torch.tensor([[3, 17, 80, 101, 5, 64]])
    with torch.inference_mode():
        expected = theirs(input_ids=ids).logits
    assert torch.allclose(model.logits(ids), expected.float(), atol=1e-3)
    assert model.generate(ids[0].tolist(), max_new_tokens=5)[0] == int(expected[0, -1].argmax())


def test_the_plan_says_what_is_no_linear_layer(tmp_path: Path) -> None:
    plan = make_plan(load(recipe(tmp_path / "model", tmp_path, W4, bank=64)), tmp_path / "out")
    (warning,) = [w for w in plan.warnings if "stays as it is" in w]
    assert warning.startswith(
        "trunk.cells.*.bank [3, 64, 64] stays as it is (2 tensors, 98.30 kB, 18% of the weights): its module Cell"
    )
    plain = make_plan(load(recipe(tmp_path / "plain", tmp_path, W4)), tmp_path / "out")
    assert not [w for w in plain.warnings if "stays as it is" in w]


def test_blocks_may_return_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Cell.forward
    listed = functools.wraps(forward)(lambda *given, **named: list(forward(*given, **named)))
    monkeypatch.setattr(Cell, "forward", listed)
    artifact = compress.apply(recipe(tmp_path / "model", tmp_path, W4), output=tmp_path / "out", quiet=True)
    assert len(artifact.manifest["layers"]) == 8


def test_a_weight_that_others_read_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed layer has none to read. A layer that is not called by its block is another matter: it stays as it is."""
    forward = Cell.forward

    @functools.wraps(forward)
    def reading(self: Any, *given: Any, **named: Any) -> Any:
        state, mixing = forward(self, *given, **named)
        return state + self.tell.weight.mean(), mixing

    monkeypatch.setattr(Cell, "forward", reading)
    request = recipe(tmp_path / "model", tmp_path, W4)
    said = r"OddForCausalLM.*trunk\.cells\.0\.tell"
    with pytest.raises(RequestError, match=said):
        make_plan(load(request), tmp_path / "out")
    with pytest.raises(RequestError, match=said):
        compress.apply(request, output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
    request["stages"] = [{"quantize": {**W4["quantize"], "ignore": ["re:.*tell"]}}]
    layers = compress.apply(request, output=tmp_path / "out", quiet=True).manifest["layers"]
    assert {layer["name"].rpartition(".")[2] for layer in layers} == {"read", "widen", "narrow", "say"}


def test_blocks_in_no_list_are_refused_with_what_there_is(tmp_path: Path) -> None:
    request = recipe(tmp_path / "model", tmp_path, W4, loose=True)
    said = r"OddForCausalLM.*ModuleList.*words \(Embedding\), trunk \(Module\), say"
    with pytest.raises(CompressError, match=said):
        make_plan(load(request), tmp_path / "out")


@pytest.mark.slow
def test_a_layer_that_calibration_does_not_reach_is_refused_at_once(tmp_path: Path) -> None:
    """Not when everything else has been computed."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=257, hidden_size=64, word_embed_proj_dim=32, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("text that is not read\n" * 100)
    asked = {
        "name": "test",
        "model": str(tmp_path / "model"),
        "calibration": {"data": str(tmp_path / "text.txt"), "samples": 4, "sequence_length": 32},
        "stages": [{"quantize": {**W4["quantize"], "targets": ["re:.*project_in"]}}],
    }
    for act in (make_plan, lambda given: compress.apply(given, output=tmp_path / "out", quiet=True)):
        with pytest.raises(CompressError, match=r"project_in.*rtn.*ignore"):
            act(load(asked) if act is make_plan else asked)
    assert not (tmp_path / "out").exists()
    asked["stages"] = [
        {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32, "targets": ["re:.*project_in"]}}
    ]
    artifact = compress.apply(asked, output=tmp_path / "out", quiet=True)
    assert [layer["name"] for layer in artifact.manifest["layers"]] == ["model.decoder.project_in"]

    asked["stages"] = [W4]
    asked["calibration"]["sequence_length"] = 16
    artifact = compress.apply(asked, output=tmp_path / "default", quiet=True)
    assert len(artifact.manifest["layers"]) == 12
    assert [w for w in artifact.warnings if "project_in" in w] == [
        "left uncompressed: model.decoder.project_out (it is in no block and is no output "
        "head, so calibration does not reach it), model.decoder.project_in (it is in no block and is no output head, so calibration does "
        "not reach it)"
    ]


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (
            "qwen3_next",
            {"num_experts": 32, "shared_expert_intermediate_size": 32},
        ),  # as many experts as the shared one is wide
        ("deepseek_v3", {"n_routed_experts": 64, "n_group": 1, "topk_group": 1}),  # and as the hidden state is
    ],
)
def test_layers_as_wide_as_there_are_experts_are_no_routers(family: str, sizes: dict[str, int]) -> None:
    from family_models import FAMILIES

    from runtime.modeling.experts import routers
    from runtime.modeling.skeleton import build_skeleton

    known = next(one for one in FAMILIES if one.name == family)
    config = known.config()
    for key, value in sizes.items():
        setattr(config, key, value)
    model = build_skeleton(config, torch.float32)
    shared = {n for n, m in model.named_modules() if "shared_expert" in n and isinstance(m, torch.nn.Linear)}
    assert len({name.rpartition(".")[2] for name in shared}) >= 3
    assert routers(model) & shared == {name for name in shared if name.endswith("shared_expert_gate")}
