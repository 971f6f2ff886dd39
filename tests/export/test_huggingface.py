"""`--target huggingface`: every kind of artifact in both layouts, loaded back by others' code or refused with the reason."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_kinds import BLOCK_FLOATS
from weight_cases import int_scheme, write_checkpoint

import export
import runtime
from export.huggingface.proof import GptqFolder as Folder
from runtime.errors import CompressError, RequestError
from runtime.formats.scheme import GridScheme, Scheme

Make = Callable[..., Path]
WEIGHT_ONLY = ["w4_g128", "w4_g32_asymmetric", "w4_channel", "w8_channel", "w3_g64", "w4_g48", "sparse_w4"]


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _export(path: Path, tmp_path: Path, **options: Any) -> Any:
    return export.export(path, "huggingface", tmp_path / "out", quiet=True, **options)


@pytest.fixture
def mixed(tiny_llama: Make, tmp_path: Path) -> Callable[..., Path]:
    """`mixed({layer suffix: scheme})`: a checkpoint in which each linear layer of a block has the first scheme that fits its name."""
    from transformers import AutoModelForCausalLM

    def make(schemes: dict[str, Scheme | None], dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
        model = AutoModelForCausalLM.from_pretrained(tiny_llama(**sizes, **changes))
        chosen = {}
        for name, module in model.named_modules():
            scheme = next((s for suffix, s in schemes.items() if name.endswith(suffix)), None)
            if scheme is not None and isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                chosen[name] = scheme
        path = tmp_path / "mixed"
        path.mkdir()
        write_checkpoint(path, model.to(dtype), chosen, dtype)
        return path

    return make


@pytest.mark.sampled(2, 8)
@pytest.mark.parametrize(
    "kind",
    ["dense", *WEIGHT_ONLY, "w8a8", "w8a8_static", "w4a8", "w4afp8", "fp8", "fp8_static", "bitmap", *BLOCK_FLOATS],
)
def test_compressed_tensors_loads_in_transformers_and_here(made: Make, tmp_path: Path, kind: str) -> None:
    result = _export(made(kind), tmp_path)
    folder = result.path
    assert result.verification.metrics["kl"] < 1e-2
    assert result.verification.metrics["tokens"] == 128
    quantization = _config(folder).get("quantization_config")
    assert (quantization is None) == (kind in ("dense", "bitmap"))
    if quantization is not None:
        assert quantization["quant_method"] == "compressed-tensors"
        bits = {group["weights"]["num_bits"] for group in quantization["config_groups"].values()}
        assert bits <= {4, 8}
    assert not (folder / "compress.json").exists()
    assert (folder / "tokenizer.json").is_file()
    prompts = [[5, 6, 7, 8], [100, 20]]
    ours, theirs = (runtime.load(p, device="cpu", dtype="float32") for p in (made(kind), folder))
    assert ours.generate(prompts, max_new_tokens=8) == theirs.generate(prompts, max_new_tokens=8)


@pytest.mark.parametrize("kind", ["w4_g128", "nvfp4"])
def test_what_needs_no_change_is_copied_tensor_by_tensor(made: Make, tmp_path: Path, kind: str) -> None:
    from runtime.checkpoint.checkpoint import Checkpoint

    result = _export(made(kind), tmp_path)
    before, after = Checkpoint(made(kind)), Checkpoint(result.path)
    assert before.names() == after.names()
    assert all(torch.equal(before.get(n).view(torch.uint8), after.get(n).view(torch.uint8)) for n in before.names())
    assert not [c for c in result.conversions if c.bytes]


@pytest.mark.sampled(1, 3)
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_gptq_holds_the_same_matrices(made: Make, tmp_path: Path, kind: str) -> None:
    if kind == "w4_g48":  # 128 columns in groups of 48 become groups of 16
        assert "16" in json.dumps(_config(_export(made(kind), tmp_path, layout="gptq", verify=False).path))
        return
    result = _export(made(kind), tmp_path, layout="gptq")
    metrics = result.verification.metrics
    assert metrics["matrices"] == 14
    assert metrics["kl"] < 1e-3
    quantization = _config(result.path)["quantization_config"]
    assert quantization == json.loads((result.path / "quantize_config.json").read_text())
    assert (quantization["bits"], quantization["sym"]) == (
        8 if kind == "w8_channel" else 4,
        kind != "w4_g32_asymmetric",
    )
    assert _config(result.path)["dtype"] == "float16"
    assert not result.losses


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("dense", "nothing in it is compressed"),
        ("w8a8", "quantizes activations"),
        ("llm_int8", "weights only$"),
        ("fp8", "is float8"),
        ("mxfp4", "is mxfp4"),
        ("bitmap", "stored in integers"),
    ],
)
def test_gptq_refuses_what_it_cannot_say(made: Make, tmp_path: Path, kind: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        _export(made(kind), tmp_path, layout="gptq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_mixed_shards_are_refused_by_name_and_unified_on_request(mixed: Make, tmp_path: Path, layout: str) -> None:
    path = mixed(
        {"k_proj": int_scheme(8, False, 32), "up_proj": int_scheme(3, True, 64), "_proj": int_scheme(4, True, 64)}
    )
    with pytest.raises(RequestError, match=r"q_proj.*k_proj.*qkv_proj.*int4.*64.*int8.*32"):
        _export(path, tmp_path, layout=layout)
    result = _export(path, tmp_path, layout=layout, unify=True)
    assert result.verification.metrics["kl"] < 1e-3
    if layout == "gptq":
        dynamic = _config(result.path)["quantization_config"]["dynamic"]
        assert dynamic["+:^model\\.layers\\.0\\.self_attn\\.qkv_proj$"] == {"bits": 8, "group_size": 32, "sym": False}


def test_transformers_needs_one_scheme_where_one_is_asymmetric(mixed: Make, tmp_path: Path) -> None:
    path = mixed({"self_attn.o_proj": None, "mlp.gate_proj": int_scheme(4, False, 64), "mlp.up_proj": int_scheme(4, False, 64),
                  "mlp.down_proj": int_scheme(4, True, 128)})  # fmt: skip
    with pytest.raises(RequestError, match="asymmetric"):
        _export(path, tmp_path)
    result = _export(path, tmp_path, unify=True)
    assert result.verification.metrics["kl"] < 1e-3
    groups = _config(result.path)["quantization_config"]["config_groups"]
    assert [group["weights"]["group_size"] for group in groups.values()] == [64]


def test_a_dense_shard_is_refused_even_with_unify(mixed: Make, tmp_path: Path) -> None:
    path = mixed({"up_proj": None, "_proj": int_scheme(4, True, 64)})
    with pytest.raises(RequestError, match=r"gate_proj.*int4.*up_proj.*dense"):
        _export(path, tmp_path, unify=True)


def test_widening_is_exact_and_can_be_declined(made: Make, tmp_path: Path) -> None:
    result = _export(made("w3_g64"), tmp_path)
    assert any("int3" in c.what and "becomes int4" in c.what and c.exact and c.bytes > 0 for c in result.conversions)
    kept = export.export(made("w3_g64"), "huggingface", tmp_path / "kept", quiet=True, keep_bits=True)
    assert _config(kept.path)["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 3
    assert any("transformers only" in c.what for c in kept.conversions)
    gptq = export.export(made("w3_g64"), "huggingface", tmp_path / "gptq", quiet=True, keep_bits=True, layout="gptq")
    assert gptq.verification.metrics["matrices"] == 14


def test_dense_layers_are_listed_for_every_reader(mixed: Make, tmp_path: Path) -> None:
    path = mixed({"gate_proj": int_scheme(4), "up_proj": int_scheme(4), "down_proj": int_scheme(4)})
    quantization = _config(_export(path, tmp_path, layout="gptq").path)["quantization_config"]
    assert quantization["modules_in_block_to_quantize"] == [["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]]
    assert "-:^model\\.layers\\.1\\.self_attn\\.qkv_proj$" in quantization["dynamic"]
    assert "-:^model\\.layers\\.1\\.self_attn\\.o_proj$" in quantization["dynamic"]
    assert not [pattern for pattern in quantization["dynamic"] if "mlp" in pattern]


@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_a_compressed_table_becomes_dense_and_the_loss_is_told(mixed: Make, tmp_path: Path, layout: str) -> None:
    path = mixed({"embed_tokens": int_scheme(8), "_proj": int_scheme(4, True, 64)})
    result = _export(path, tmp_path, layout=layout)
    assert list(result.losses) == ["model.embed_tokens"]
    assert 0 < result.losses["model.embed_tokens"] < 0.005  # half a step of bfloat16
    assert any(c.modules == ("model.embed_tokens",) and not c.exact for c in result.conversions)


def test_scales_that_float16_cannot_hold_need_requantize(mixed: Make, tmp_path: Path) -> None:
    path = mixed({"_proj": int_scheme(4, True, 64)}, torch.float32)
    with pytest.raises(RequestError, match=r"float16.*requantize=true"):
        _export(path, tmp_path, layout="gptq")
    result = _export(path, tmp_path, layout="gptq", requantize=True)
    assert len(result.losses) == 14
    assert max(result.losses.values()) < 2**-11


def test_asymmetric_zero_points_in_both_checkpoint_formats(mixed: Make, tmp_path: Path) -> None:
    path = mixed({"_proj": int_scheme(4, False, 32)})
    first = _export(path, tmp_path, layout="gptq")
    second = export.export(path, "huggingface", tmp_path / "v2", quiet=True, layout="gptq", checkpoint_format="gptq_v2")
    name = "model.layers.0.mlp.down_proj"
    assert (Folder(first.path).dequantize(name) == Folder(second.path).dequantize(name)).all()
    marks = [_config(r.path)["quantization_config"]["meta"]["quantizer"] for r in (first, second)]
    assert [len(mark) for mark in marks] == [2, 1]


def test_shapes_that_fill_no_words_are_refused(mixed: Make, tmp_path: Path) -> None:
    path = mixed({"o_proj": int_scheme(4)}, num_attention_heads=2, head_dim=6)
    with pytest.raises(RequestError, match=r"o_proj.*\b12\b.*\b4\b"):
        _export(path, tmp_path, layout="gptq")


def test_float_weights_in_groups_load_and_vllms_objection_is_said(mixed: Make, tmp_path: Path) -> None:
    result = _export(mixed({"_proj": Scheme(GridScheme(8, "float", True, "group", 64))}), tmp_path)
    assert any("vLLM has no kernel for float8 in groups of 64" in c.what for c in result.conversions)


def test_options_of_the_other_layout_are_refused(made: Make, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="checkpoint_format"):
        _export(made("w4_g128"), tmp_path, checkpoint_format="gptq_v2")
    with pytest.raises(RequestError, match=r"\blayout\b"):
        _export(made("w4_g128"), tmp_path, layout="awq")


def test_a_wrong_matrix_is_noticed(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.huggingface import gptq

    true_pack = gptq.pack

    def off_by_one(*given: Any) -> dict[str, torch.Tensor]:
        tensors = true_pack(*given)
        return tensors | {"qzeros": tensors["qzeros"] + 0x11111111}

    monkeypatch.setattr(gptq, "pack", off_by_one)
    with pytest.raises(CompressError, match="_proj"):
        _export(made("w4_g128"), tmp_path, layout="gptq")
    assert not (tmp_path / "out").exists()


def test_gptqmodel_itself_where_it_is_installed(made: Make, tmp_path: Path) -> None:
    if importlib.util.find_spec("gptqmodel") is None:
        result = _export(made("w4_g128"), tmp_path, layout="gptq")
        assert any("GPTQModel is not installed here" in note for note in result.verification.notes)
        pytest.skip("gptqmodel is not installed: benchmarks/huggingface_check.py runs it in an environment of its own")
    metrics = _export(made("w4_g32_asymmetric"), tmp_path, layout="gptq").verification.metrics
    assert metrics["gptqmodel_kl"] < 1e-3
    assert metrics["gptqmodel_tokens"] == 128


@pytest.mark.parametrize("family", ["Qwen2", "Mixtral", "Phi3"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "gptq"])
def test_biases_experts_and_fused_layers(tmp_path: Path, family: str, layout: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
        max_position_embeddings=64, bos_token_id=None, eos_token_id=98, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    chosen = {
        n: int_scheme(4, True, 32) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "_proj" in n
    }
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    write_checkpoint(artifact, model.to(torch.bfloat16), chosen, torch.bfloat16)
    result = _export(artifact, tmp_path, layout=layout)
    assert result.verification.metrics["matrices"] == len(chosen)
    if family == "Mixtral" and layout == "gptq":
        assert "-:.*\\.experts(\\..*)?$" in _config(result.path)["quantization_config"]["dynamic"]
