"""What cannot be asked of every family, and what must be kept of models whose layers differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, Family
from random_models import UNLIMITED

import compress
import runtime
from compress.distill.draft.cut import chosen_layers
from compress.model.config_sizes import with_layers
from compress.model.hybrid_layers import attending, attends
from runtime.errors import RequestError

RTN = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}
NESTED = {
    "recover": {
        "method": "matformer", "widths": ["50%", "100%"], "samples": 16, "sequence_length": 32, "steps": 2, "batch_size": 4,
        "evaluate_every": 1,
    }
}  # fmt: skip
DRAFT = {
    "draft": {"method": "distillspec", "samples": 16, "sequence_length": 32, "steps": 2, "batch_size": 4, "data": "given"}
}  # fmt: skip
IDS = [3, 17, 80, 101, 5, 64, 33, 2]


def family(name: str, **settings: Any) -> Family:
    found = next(family for family in FAMILIES if family.name == name)
    return replace(found, settings={**found.settings, **settings})


def request(path: Path, *stages: dict[str, Any]) -> dict[str, Any]:
    text = path.parent / "text.txt"
    text.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(300)))
    calibration = {"data": str(text), "samples": 8, "sequence_length": 32, "batch_size": 4}
    return {"name": "test", "model": str(path), "calibration": calibration, "stages": list(stages)}


def layers(keep: int) -> dict[str, Any]:
    return {"structure": {"method": "block_influence", "remove": "layers", "keep": keep}}


def generated(path: Path) -> list[int]:
    model = runtime.load(path)
    model.tokenizer = None
    return list(model.generate(IDS, max_new_tokens=4))


TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_layer_with_attention_stays(tmp_path: Path, keep: int) -> None:
    """transformers counts by it the tokens that a cache holds."""
    from transformers import AutoModelForCausalLM

    path = family("qwen3_next", layer_types=TYPES, num_hidden_layers=4).write(tmp_path / "model")
    made = compress.apply(request(path, layers(keep)), output=tmp_path / "out", quiet=True)
    config = json.loads((made.path / "config.json").read_text())
    assert len(config["layer_types"]) == keep
    assert "full_attention" in config["layer_types"]
    theirs = AutoModelForCausalLM.from_pretrained(made.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, -1]
    assert generated(made.path)[0] == int(expected.argmax())


def test_what_matters_least_gives_place_to_attention() -> None:
    config = family("qwen3_next", layer_types=TYPES, num_hidden_layers=4).config()
    assert not attends(with_layers(config, [0, 3]))
    assert attending(config, [0, 3], [1, 2], 3) == [0, 2]
    assert attending(config, [1, 2], [0, 3], 1) == [1, 2]


def test_places_that_decide_what_layers_are_refuse_fewer(tmp_path: Path) -> None:
    """The first of Jamba's layers has no attention, whichever it was."""
    path = family("jamba").write(tmp_path / "model")
    with pytest.raises(RequestError, match=r"stages\.0\.structure\.remove: .*1 of its 2 layers .*jamba"):
        compress.plan(request(path, layers(1)))
    with pytest.raises(RequestError, match=r"stages\.1\.draft\.layers: .*1 of its 2 layers .*jamba"):
        compress.plan(request(path, RTN, {"draft": {**DRAFT["draft"], "layers": 1}}))


@pytest.mark.slow
def test_a_draft_has_a_layer_with_attention(tmp_path: Path) -> None:
    path = family("qwen3_next", layer_types=TYPES, num_hidden_layers=4).write(tmp_path / "model")
    made = compress.apply(
        request(path, RTN, {"draft": {**DRAFT["draft"], "layers": 1}}), output=tmp_path / "out", quiet=True
    )
    assert json.loads((made.path / "draft" / "config.json").read_text())["layer_types"] == ["full_attention"]
    assert generated(made.path)
    config = family("qwen3_next", layer_types=TYPES, num_hidden_layers=4).config()
    assert chosen_layers(config, 4, 1) == [2]
    assert chosen_layers(config, 4, 2) == [0, 2]
    with pytest.raises(RequestError, match=r"stages\.1\.draft\.method: .*\[0, 1\]"):
        compress.plan(request(path, RTN, {"draft": {**DRAFT["draft"], "layers": [0, 1]}}))


def test_dimensions_that_layers_have_several_values_for_are_refused(tmp_path: Path) -> None:
    """Mamba's inner channels are no dimensions of the hidden state."""
    path = family("jamba").write(tmp_path / "model")
    stage = {"structure": {"method": "activation", "remove": "hidden", "keep": 48}}
    with pytest.raises(
        RequestError, match=r"stages\.0\.structure\.remove: model\.layers\.0\.mamba\.\S+ .*JambaForCausalLM"
    ):
        compress.plan(request(path, stage))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "mixtral"])
def test_nested_widths_of_experts_are_refused(name: str, tmp_path: Path) -> None:
    path = family(name).write(tmp_path / "model")
    with pytest.raises(RequestError, match=r"stages.0.recover.method: "):
        compress.plan(request(path, NESTED))


BESIDE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 257,
}  # fmt: skip
GPTQ = {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}


def test_layers_that_read_more_than_hidden_states(tmp_path: Path) -> None:
    """Of the small Gemma 4: what was computed of the first text would be taken for that of all."""
    path = Family("gemma4_text", BESIDE).write(tmp_path / "model")
    for stages, more in (
        ([GPTQ], {}),
        ([RTN], {"evaluate": {**UNLIMITED, "sequence_length": 32, "samples": 8}}),
        ([layers(2)], {}),
    ):
        with pytest.raises(
            RequestError, match=r"\(hidden_size_per_layer_input 16, num_kv_shared_layers 2 in config.json"
        ):
            compress.plan({**request(path, *stages), **more})
    made = compress.apply(request(path, RTN), output=tmp_path / "out", quiet=True)
    (told,) = [w for w in made.warnings if w.startswith("left uncompressed: ")]
    assert "model.layers.*.per_layer_projection (rows of 16 weights, and groups of 32; 4 layers)" in told
    assert "model.per_layer_model_projection (it is in no block" in told
    assert len(made.manifest["layers"]) == 28
    assert generated(made.path)


def test_several_hidden_states_at_once_are_refused(tmp_path: Path) -> None:
    settings = {**BESIDE, "laurel_rank": 16, "activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [96] * 4}
    del settings["global_head_dim"]
    path = Family("gemma3n_text", settings).write(tmp_path / "model")
    with pytest.raises(RequestError, match=r"Gemma3nForCausalLM .*altup_num_inputs"):
        compress.plan(request(path, RTN))


@pytest.mark.slow
def test_a_tower_beside_the_language_model_limits_no_rows(tmp_path: Path) -> None:
    """CLIP has a vector for each of its few places; LLaVA's text has none."""
    path = family("llava").write(tmp_path / "model")
    stage = {
        "recover": {
            "method": "finetune", "samples": 16, "sequence_length": 32, "steps": 2, "batch_size": 4, "evaluate_every": 1,
        }
    }  # fmt: skip
    made = compress.apply(request(path, RTN, stage), output=tmp_path / "out", quiet=True)
    assert generated(made.path)
