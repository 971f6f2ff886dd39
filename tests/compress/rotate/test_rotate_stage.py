"""Stage `rotate`: rotated checkpoints compute what they did, outliers are spread, and what cannot be rotated is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import bert, save, t5
from family_models import FAMILIES
from random_models import UNLIMITED
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import compress
import runtime
from compress.distill.recover.alignment import Alignment
from compress.rotate import hidden_matrix
from compress.rotate.rotation import HiddenRotation
from compress.rotate.stage import RotatedCheckpoint
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError

ROTATE = {"rotate": {"method": "hadamard"}}
#: Layers whose values are rotated, of two each.
VALUES = {
    "llama": 2, "mistral": 2, "qwen2": 2, "qwen3": 2, "phi3": 2, "olmo": 2, "gpt2": 2, "gptj": 2, "gpt_neox": 0, "falcon": 0, "mpt": 2,
    "starcoder2": 2, "mixtral": 2, "granitemoe": 2, "qwen3_moe": 2, "deepseek_v3": 0, "gpt_oss": 2, "qwen3_next": 0, "jamba": 1,
    "falcon_h1": 2,
}  # fmt: skip


def source(name: str, path: Path) -> Path:
    """A random model of a family in float32, whose norms have weights as trained ones have."""
    next(family for family in FAMILIES if family.name == name).write(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(3)
    for key, value in tensors.items():
        if value.ndim == 1 and key.endswith("weight"):
            tensors[key] = value + 0.3 * torch.randn(value.shape, generator=draw)
    save_file(tensors, file, {"format": "pt"})
    return path


def logits(path: Path) -> torch.Tensor:
    ids = torch.randint(0, 250, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits


def applied(model: Path, output: Path, *stages: dict[str, Any], **more: Any) -> compress.AppliedArtifact:
    recipe = {"name": "rotated", "model": str(model), "stages": list(stages or [ROTATE]), **more}
    return compress.apply(recipe, output=output, quiet=True)


def record(path: Path) -> dict[str, Any]:
    return json.loads((path / "compress.json").read_text())["passes"][0]


@pytest.mark.sampled(6, 6)
@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_rotated_model_computes_what_it_did(name: str, tmp_path: Path) -> None:
    model = source(name, tmp_path / "source")
    made = applied(model, tmp_path / "out").path
    whole, rotated = logits(model), logits(made)
    assert float((rotated - whole).norm() / whole.norm()) < 1e-5
    found = record(made)
    assert (found["values"], found["hidden"]) == (VALUES[name], True)
    before, after = Checkpoint(model), Checkpoint(made)
    same = [key for key in before.names() if torch.equal(before.get(key), after.get(key))]
    assert len(same) < len(before.names()) / 2
    before, after = (
        load_file(path / "model.safetensors") if (path / "model.safetensors").exists() else {} for path in (model, made)
    )
    changed = [key for key in before.keys() & after.keys() if not torch.equal(before[key], after[key])]
    assert not after or len(changed) > len(before) // 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma2", "post_attention_layernorm: no linear layer reads the output of this norm.*hidden: false"),
        ("bloom", "word_embeddings_layernorm and transformer.ln_f .* are norms outside the layers"),
        ("opt", "only for some hidden sizes"),
        ("glm4", "post_mlp_layernorm: no linear layer reads"),
        ("llava", "only decoders of text"),
        ("t5", "only decoders of text"),
        ("bert", "only decoders of text"),
    ],
)
def test_what_cannot_be_rotated_is_refused(name: str, message: str, tmp_path: Path) -> None:
    others = {"t5": t5, "bert": bert}
    path = tmp_path / "source"
    model = save(others[name](), path) if name in others else source(name, path)
    with pytest.raises(RequestError, match=message):
        applied(model, tmp_path / "out")


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
def test_values_can_be_rotated_alone(name: str, tmp_path: Path) -> None:
    model = source(name, tmp_path / "source")
    if name == "bloom":  # queries, keys and values of a head stand side by side
        with pytest.raises(RequestError, match="nothing of a BloomForCausalLM was rotated"):
            applied(model, tmp_path / "out", {"rotate": {"method": "hadamard", "hidden": False}})
        return
    made = applied(model, tmp_path / "out", {"rotate": {"method": "hadamard", "hidden": False}}).path
    assert float((logits(made) - logits(model)).norm() / logits(model).norm()) < 1e-5
    assert (record(made)["values"], record(made)["untied"]) == (2, False)


def test_fields_that_leave_nothing_to_rotate_are_refused(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="leave nothing to rotate"):
        applied(tiny_llama(), tmp_path / "out", {"rotate": {"method": "hadamard", "hidden": False, "values": False}})


def test_sizes_without_a_hadamard_matrix_have_the_other_method(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_llama(hidden_size=52, head_dim=10)
    with pytest.raises(RequestError, match="no Hadamard matrix of size 52 is known here; method orthogonal has one"):
        applied(model, tmp_path / "no")
    with pytest.raises(RequestError, match="nothing of a LlamaForCausalLM was rotated: no Hadamard matrix of size 10"):
        applied(model, tmp_path / "none", {"rotate": {"method": "hadamard", "hidden": False}})
    made = applied(model, tmp_path / "out", {"rotate": {"method": "orthogonal"}}).path
    assert record(made)["values"] == 2
    assert float((logits(made) - logits(model)).norm() / logits(model).norm()) < 0.05  # of bfloat16


def test_a_head_that_was_tied_has_weights_of_its_own(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    made = applied(
        tiny_llama(), tmp_path / "out", evaluate={**UNLIMITED, "data": "bundled", "samples": 4, "sequence_length": 64}
    )
    assert json.loads((made.path / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("the checkpoint grows by" in warning for warning in made.warnings)
    assert "lm_head.weight" in Checkpoint(made.path).names()
    plan = compress.plan({"name": "rotated", "model": str(tiny_llama()), "stages": [ROTATE]})
    head = next(tensor for tensor in plan.tensors if tensor.name == "lm_head.weight")
    assert (head.bytes_before, head.bytes_after) == (0, 257 * 64 * 2)
    assert made.metrics["kl"] < 1e-3
    assert "What was rotated" in (made.path / "report.html").read_text()
    assert isinstance(runtime.load(made.path).generate("line 1", max_new_tokens=4), str)


def test_a_rotated_model_is_quantized_and_runs_in_the_native_engine(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    made = applied(
        tiny_llama(), tmp_path / "out", ROTATE, {"quantize": {"method": "rtn", "bits": 8, "group_size": 32}}
    ).path
    model = runtime.load(made)
    assert type(model.engine).__name__ == "NativeEngine"
    ids = torch.randint(0, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    whole = AutoModelForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float32)(ids).logits
    found = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)(ids).logits
    assert float((found - whole).norm() / whole.norm()) < 0.05


def test_an_outlier_is_spread_so_that_4_bit_inputs_bear_it(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    """One dimension of the hidden state is 30 times larger than the others, and the layers that read it expect that."""
    path = tmp_path / "outlier"
    path.mkdir()
    for file in tiny_llama(tie_word_embeddings=False).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    for key, value in tensors.items():
        if key.endswith("embed_tokens.weight"):
            value[:, 5] *= 30
        elif key.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "lm_head.weight")
        ):
            value[:, 5] /= 30
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    quantize = {"quantize": {"method": "rtn", "bits": 8, "group_size": 32, "activations": "int4"}}
    measured = {**UNLIMITED, "data": "bundled", "samples": 8, "sequence_length": 64}
    plain = applied(path, tmp_path / "plain", quantize, evaluate=measured).metrics["kl"]
    rotated = applied(path, tmp_path / "rotated", ROTATE, quantize, evaluate=measured).metrics["kl"]
    assert rotated < plain / 2


def test_a_wrong_rotation_is_found(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HiddenRotation, "gain", lambda self, norm: torch.full((64,), 1.1))
    with pytest.raises(
        RequestError, match=r"stages.0.rotate: model.layers.0 computes something else when the hidden state is rotated"
    ):
        applied(tiny_llama(), tmp_path / "out")


def interrupt(recipe: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a recipe up to the second block that it rotates."""
    block = RotatedCheckpoint.block

    def interrupted(self: RotatedCheckpoint, index: int) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return block(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(RotatedCheckpoint, "block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compress.apply(recipe, output=output, quiet=True)


def test_an_interrupted_run_gives_the_same_bytes(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {"name": "rotated", "model": str(tiny_llama()), "stages": [ROTATE]}
    whole = compress.apply(recipe, output=tmp_path / "whole", quiet=True).path
    interrupt(recipe, tmp_path / "resumed", monkeypatch)
    block = RotatedCheckpoint.block
    seen: list[int] = []
    monkeypatch.setattr(RotatedCheckpoint, "block", lambda self, index: (seen.append(index), block(self, index))[1])
    resumed = compress.apply(recipe, output=tmp_path / "resumed", resume=True, quiet=True).path
    assert seen == [1]
    files = [{file.name: file.read_bytes() for file in path.glob("*.safetensors")} for path in (whole, resumed)]
    assert files[0]
    assert files[0] == files[1]


def test_recovery_compares_hidden_states_as_they_are_rotated(
    tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path
) -> None:
    """A student that was rotated, and pruned a little, begins near its teacher."""
    recover = {"recover": {"method": "finetune", "steps": 1, "samples": 8, "batch_size": 2}}
    prune = {"prune": {"method": "magnitude", "pattern": "unstructured", "sparsity": 0.01}}
    made = applied(
        tiny_llama(), tmp_path / "out", ROTATE, prune, recover,
        calibration={"data": str(tiny_text), "sequence_length": 64, "samples": 8},
    )  # fmt: skip
    facts = next(
        entry for entry in json.loads((made.path / "compress.json").read_text())["passes"] if "recover" in entry
    )
    assert facts["before"]["squarehead"] < 0.01


def alignment_of(*records: dict[str, Any]) -> Alignment:
    return Alignment.of([2], records, None)


def test_states_of_a_teacher_follow_cuts_and_rotations_in_their_order() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    kept = [0, 2, 3, 7]
    cut = {"remove": "hidden", "dimensions": kept}
    facts = [{"size": size, "seed": 1, "keeps_mean": False} for size in (8, 4)]
    large, small = (hidden_matrix("hadamard", one).float() for one in facts)
    before, after = ({"rotate": "hadamard", "matrix": one} for one in facts)
    assert torch.allclose(alignment_of(before).states(x), x @ large, atol=1e-6)
    assert torch.allclose(alignment_of(cut, after).states(x), x[:, kept] @ small, atol=1e-6)
    assert torch.allclose(alignment_of(before, cut).states(x), (x @ large)[:, kept], atol=1e-6)
    assert torch.allclose(alignment_of(before, cut, after).states(x), (x @ large)[:, kept] @ small, atol=1e-6)
    assert torch.equal(alignment_of({"rotate": "hadamard", "matrix": None}).states(x), x)


def test_a_cut_of_uneven_widths_is_rotated(tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path: Path) -> None:
    cut = {"structure": {"method": "magnitude", "remove": "ffn", "ratio": 0.5, "allocation": "error", "multiple": 16}}
    text = {"data": str(tiny_text), "sequence_length": 64, "samples": 8}
    made = applied(tiny_llama(), tmp_path / "out", cut, ROTATE, calibration=text).path
    alone = applied(tiny_llama(), tmp_path / "cut", cut, calibration=text).path
    found, expected = (
        runtime.load(path).score("line 1: the square of 1 is 1").log_likelihood for path in (made, alone)
    )
    assert found == pytest.approx(expected, rel=0.01)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    model = source("deepseek_v3", tmp_path / "source")
    tensors = load_file(model / "model.safetensors")
    tensors |= {f"model.layers.2.{key}": torch.ones(64) for key in ("enorm.weight", "hnorm.weight")}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    made = applied(model, tmp_path / "out")
    assert any("2 tensors of layers for multi-token prediction" in warning for warning in made.warnings)
    assert json.loads((made.path / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert not [name for name in Checkpoint(made.path).names() if ".layers.2." in name]


def test_weights_that_overflow_float16_are_refused_by_name(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    path = changed_copy(
        tiny_llama(), tmp_path / "half", lambda key, value: value.half() * (6e4 if "norm" in key else 20)
    )
    with pytest.raises(CompressError, match=r"weight overflows float16 once it is rotated"):
        applied(path, tmp_path / "out")


def test_zeros_that_become_dense_are_told(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    def halved(key: str, value: torch.Tensor) -> torch.Tensor:
        return value * (torch.arange(value.shape[-1]) % 2).to(value) if key.endswith("proj.weight") else value

    path = changed_copy(tiny_llama(), tmp_path / "sparse", halved)
    warnings = applied(path, tmp_path / "out").warnings
    assert any("50% of the rotated weights were zero" in warning for warning in warnings)


def test_values_stay_where_they_are_not_asked_for_and_seeds_differ(
    tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    made = [
        applied(tiny_llama(), tmp_path / str(number), {"rotate": {"method": "hadamard", **fields}}).path
        for number, fields in enumerate(({"values": False}, {"values": False, "seed": 1}, {}))
    ]
    assert [record(path)["values"] for path in made] == [0, 0, 2]
    name = "model.layers.0.self_attn.v_proj.weight"
    first, other, both = (Checkpoint(path).get(name) for path in made)
    assert not torch.equal(first, other)
    assert not torch.equal(first, both)


def test_what_reads_4_bit_activations(tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    stage = {"quantize": {"method": "rtn", "scheme": "W4A4", "group_size": 32}}
    made = applied(tiny_llama(), tmp_path / "out", stage).path
    readers = {entry["name"]: entry for entry in json.loads((made / "compress.json").read_text())["readable_by"]}
    assert readers["vLLM"]["how"] != "yes"
    assert "int4 activations" in json.dumps(readers["vLLM"])


def changed_copy(model: Path, path: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy of a checkpoint with every tensor changed."""
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tensors = {key: change(key, value).contiguous() for key, value in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return path
