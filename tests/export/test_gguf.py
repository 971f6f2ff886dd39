"""`--target gguf`: what the file holds is the artifact bit for bit, said or refused otherwise; llama.cpp computes the same."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import export
from export.gguf import grids
from export.source import Source
from export.target import Conversion
from runtime.errors import CompressError, RequestError
from runtime.formats.checks import expand_groups
from runtime.scheme import CompressedWeight, Scheme, WeightScheme
from tests.runtime.weight_cases import int_scheme, random_weight, write_checkpoint

gguf = pytest.importorskip("gguf")
LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None
needs_llama_cpp = pytest.mark.skipif(not LLAMA_CPP, reason="llama-cpp-python is not installed")
Make = Callable[..., Path]


def _export(path: Path, output: Path, **options: Any) -> Any:
    return export.export(path, "gguf", output, quiet=True, **options)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, torch.Tensor]]]:
    """(metadata, {tensor: (type, float32 values)}) of the file, by the gguf package alone."""
    reader = gguf.GGUFReader(folder / "model.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {}
    for tensor in reader.tensors:
        if tensor.tensor_type.name == "F32":  # the package gives these back with their shape
            values = numpy.array(tensor.data)
        else:
            values = gguf.quants.dequantize(numpy.array(tensor.data), tensor.tensor_type)
        tensors[tensor.name] = (tensor.tensor_type.name, torch.from_numpy(numpy.array(values, dtype=numpy.float32)))
    return keys, tensors


def _exactly(weight: CompressedWeight) -> torch.Tensor:
    """`(q - z) * scale` without rounding, float32."""
    scheme, columns = weight.scheme.weights, weight.values.shape[1]
    if scheme is None:
        return weight.values.float()
    assert weight.scale is not None
    scale = (
        weight.scale.double() if scheme.strategy == "tensor" else expand_groups(weight.scale.double(), scheme, columns)
    )
    zero: Any = 0
    if weight.zero_point is not None:
        zero = weight.zero_point.double()
        zero = zero if scheme.strategy == "tensor" else expand_groups(zero, scheme, columns)
    return ((weight.values.double() - zero) * scale).float()


def _unrotate(values: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k rows back to transformers': pair i of a head is rows i and i + half."""
    rows, half = values.shape[0], values.shape[0] // heads // 2
    back = torch.empty_like(values)
    for row in range(rows):
        head, inside = divmod(row, 2 * half)
        pair, second = divmod(inside, 2)
        back[head * 2 * half + second * half + pair] = values[row]
    return back


def _model(family: str, path: Path, dtype: torch.dtype = torch.bfloat16, save: bool = True, **changes: Any) -> Any:
    """A tiny random decoder with values that matter everywhere (biases and norms too), and a tokenizer of bytes."""
    import transformers

    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }[family]
    settings: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 257, "max_position_embeddings": 128, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 256,
        "rms_norm_eps": 1e-4,
    }  # fmt: skip
    settings |= {"sliding_window": None} if family == "mistral" else {}
    settings |= {"head_dim": 16} if family == "qwen3" else {}
    if family == "gpt2":
        settings = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 257, "n_positions": 128}
    torch.manual_seed(0)
    made = model(config(**{**settings, **changes}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made = made.to(dtype)
    if save:
        made.save_pretrained(path)
        _bytes_tokenizer().save_pretrained(path)
    return made


def _bytes_tokenizer() -> Any:
    from tests.conftest import _byte_tokenizer

    return _byte_tokenizer()


def _compressed(
    path: Path, scheme: Scheme, layer: str = "q_proj", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """A tiny Llama in which one kind of layer has the scheme."""
    model = _model("llama", path, dtype, save=False, **changes)
    path.mkdir(parents=True, exist_ok=True)
    names = [n for n, m in model.named_modules() if n.endswith(layer) and isinstance(m, torch.nn.Linear)]
    write_checkpoint(path, model, dict.fromkeys(names, scheme), dtype)
    _bytes_tokenizer().save_pretrained(path)
    return path


# ---------------------------------------------------------------- blocks
_GRIDS = {
    **{f"int{bits}": (int_scheme(bits, group=64), "Q4_0" if bits < 5 else "Q5_0" if bits == 5 else "Q8_0") for bits in range(2, 9)},
    **{f"int{bits} asymmetric": (int_scheme(bits, False, 32), "Q4_0" if bits < 4 else "Q5_0" if bits == 4 else "Q8_0")
       for bits in range(2, 8)},
    "int4 channel": (int_scheme(4), "Q4_0"),
    "int4 tensor": (int_scheme(4, group="tensor"), "Q4_0"),
    "int4 asymmetric tensor": (int_scheme(4, False, "tensor"), "Q5_0"),
    "int4 with a short last group": (int_scheme(4, group=128), "Q4_0"),
    "int8 wider than a row": (int_scheme(8, group=200), "Q8_0"),
    "2:4 int4": (int_scheme(4, group=64, sparsity="2:4"), "Q4_0"),
}  # fmt: skip


@pytest.mark.parametrize("name", _GRIDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_hold_codes_and_scales_as_they_are(name: str, dtype: torch.dtype) -> None:
    scheme, kind = _GRIDS[name]
    weight = random_weight(scheme, (24, 192), dtype)
    assert scheme.weights is not None
    assert grids.aligned(scheme.weights, 192)
    assert grids.block_type(scheme.weights) == kind
    packed = grids.pack(weight, kind)
    found = gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(found), _exactly(weight))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_blocks_are_laid_out_as_the_gguf_package_lays_them_out(kind: str) -> None:
    """Weights that the package's own rounding leaves as they are become the package's own bytes."""
    low, high = {"Q4_0": (-8, 7), "Q4_1": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-127, 127)}[kind]
    bits = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q8_0": 8}[kind]
    scheme = int_scheme(bits, kind != "Q4_1", 32)
    codes = torch.randint(low, high + 1, (16, 96), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    codes[:, ::32], codes[:, 1::32] = low, high  # both ends in every block, so that the package finds the same scale
    scale = torch.full((16, 3), 0.25, dtype=torch.bfloat16)
    zero = torch.full((16, 3), -3, dtype=torch.int8) if kind == "Q4_1" else None
    weight = CompressedWeight(codes, scale, zero, None, scheme, torch.bfloat16)
    theirs = gguf.quants.quantize(_exactly(weight).numpy(), gguf.GGMLQuantizationType[kind])
    assert grids.pack(weight, kind).numpy().tobytes() == theirs.tobytes()


def test_scales_are_checked_one_by_one() -> None:
    good = torch.tensor([1.0, 2.0**-17 * 1.9921875, 65280.0], dtype=torch.bfloat16)
    assert grids.scale_fits(good)
    for bad in (1e-7, 1e5, 2.0**-18 * 1.9921875):
        assert not grids.scale_fits(torch.cat([good, torch.tensor([bad], dtype=torch.bfloat16)]))
    assert not grids.scale_fits(torch.tensor([0.1], dtype=torch.float32))


def test_minima_of_q4_1_round_by_less_than_one_percent_of_a_step() -> None:
    weight = random_weight(int_scheme(4, False, 32), (64, 256))
    assert weight.scale is not None
    assert weight.zero_point is not None
    assert not grids.minimum_fits(weight.scale, weight.zero_point)
    found = gguf.quants.dequantize(grids.pack(weight, "Q4_1").numpy(), gguf.GGMLQuantizationType.Q4_1)
    step = expand_groups(weight.scale.float(), weight.scheme.weights, 256)
    off = ((torch.from_numpy(found) - _exactly(weight)) / step).abs()
    assert 0 < float(off.max()) < 15 * 2.0**-11


# ---------------------------------------------------------------- whole files
@pytest.mark.parametrize(
    ("kind", "types"),
    [
        ("dense", {"BF16", "F32"}),
        ("w4_g128", {"Q4_0", "BF16", "F32"}),
        ("w4_g32_asymmetric", {"Q5_0", "BF16", "F32"}),
        ("w8_channel", {"Q8_0", "BF16", "F32"}),
        ("w8a8", {"Q8_0", "BF16", "F32"}),
        ("fp8", {"BF16", "F32"}),
        ("sparse_w4", {"Q4_0", "BF16", "F32"}),
        ("bitmap", {"BF16", "F32"}),
    ],
)
def test_every_tensor_is_the_artifacts(made: Make, tmp_path: Path, kind: str, types: set[str]) -> None:
    result = _export(made(kind), tmp_path / "out")
    source = Source(made(kind))
    _, tensors = _read(result.path)
    assert {found for found, _ in tensors.values()} == types
    assert result.losses == {}
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    seen = 0
    for block in range(2):
        for short, long in names.items():
            _, found = tensors[f"blk.{block}.{short}.weight"]
            heads = {"attn_q": 4, "attn_k": 2}.get(short)
            found = found if heads is None else _unrotate(found, heads)
            module = f"model.layers.{block}.{long}"
            if module not in source.entries:
                expected = source.dense(f"{module}.weight").float()
            elif kind == "fp8":  # bfloat16 as the artifact itself gives it in its own dtype
                expected = source.weight(module).dequantize().float()
            else:
                expected = _exactly(source.weight(module))
            assert torch.equal(found, expected), module
            seen += 1
        for short, long in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")):
            assert torch.equal(
                tensors[f"blk.{block}.{short}.weight"][1], source.dense(f"model.layers.{block}.{long}.weight").float()
            )
            seen += 1
    assert torch.equal(tensors["token_embd.weight"][1], source.dense("model.embed_tokens.weight").float())
    assert torch.equal(tensors["output_norm.weight"][1], source.dense("model.norm.weight").float())
    assert len(tensors) == seen + 2  # tied: no output.weight


def test_what_changes_is_said_before(made: Make, tmp_path: Path) -> None:
    def said(kind: str, **options: Any) -> dict[str, Conversion]:
        result = _export(made(kind), tmp_path / kind, verify=False, **options)
        found = {c.what.split(" become")[0]: c for c in result.conversions}
        assert (
            sum(c.bytes or 0 for c in result.conversions)
            == sum(result.facts["types"].values()) - Source(made(kind)).bytes
        )
        return found

    bitmap = next(c for what, c in said("bitmap").items() if "unstructured" in what)
    assert bitmap.exact
    assert bitmap.bytes is not None
    assert bitmap.bytes > 0
    assert "zeros stored" in bitmap.what
    fp8 = said("fp8")
    assert "no float8" in fp8["float8 weights"].what
    rounding = next(c for c in fp8.values() if "activation grid" in c.what)
    assert len(rounding.modules) == 14
    assert any("activation grid" in c.what for c in said("w8a8").values())
    assert not any("activation grid" in c.what for c in said("w4_g128").values())


def test_asymmetric_int4_in_q4_1_reports_what_it_loses(made: Make, tmp_path: Path) -> None:
    result = _export(made("w4_g32_asymmetric"), tmp_path / "out", asymmetric="q4_1")
    assert result.facts["main_type"] == "Q4_1"
    assert len(result.losses) == 14
    assert 0 < max(result.losses.values()) < 1e-3
    assert any("minima rounded to fp16" in c.what and not c.exact for c in result.conversions)


def test_asymmetric_int4_becomes_q4_1_by_itself_where_that_is_exact(tmp_path: Path) -> None:
    path = _compressed(tmp_path / "model", int_scheme(4, False, 32))
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_scale"):  # powers of two: every minimum is an fp16 number
            tensors[name] = torch.full_like(tensors[name], 0.125)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    result = _export(path, tmp_path / "out")
    assert "Q4_1" in result.facts["types"]
    assert "Q5_0" not in result.facts["types"]
    assert result.losses == {}


@pytest.mark.parametrize(("dense", "kind"), [("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")])
def test_dense_type_is_a_choice(made: Make, tmp_path: Path, dense: str, kind: str) -> None:
    result = _export(made("dense"), tmp_path / "out", dense=dense)
    _, tensors = _read(result.path)
    assert tensors["blk.0.ffn_up.weight"][0] == kind
    assert tensors["blk.0.attn_norm.weight"][0] == "F32"


def test_rows_that_are_no_multiple_of_32_are_dense(tmp_path: Path) -> None:
    path = _compressed(tmp_path / "model", int_scheme(4, group=16), "down_proj", intermediate_size=80)
    result = _export(path, tmp_path / "out")
    _, tensors = _read(result.path)
    kind, found = tensors["blk.0.ffn_down.weight"]
    assert kind == "BF16"
    assert torch.equal(found, Source(path).weight("model.layers.0.mlp.down_proj").dequantize().float())
    assert any("no multiple of 32" in c.what for c in result.conversions)


# ---------------------------------------------------------------- hostile weights
def test_groups_that_cut_blocks_are_refused_or_rounded(made: Make, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"model\.layers\.0\.\S+ has groups of 48.*--requantize"):
        _export(made("w4_g48"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = _export(made("w4_g48"), tmp_path / "out", requantize=True, verify=False)
    assert len(result.losses) == 14
    assert 0.01 < max(result.losses.values()) < 0.2
    assert any("rounded anew to Q4_0" in c.what and not c.exact for c in result.conversions)


def _with_scale(path: Path, value: float, dtype: torch.dtype) -> Path:
    _compressed(path, int_scheme(4, group=32), dtype=dtype)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_scale"):
            tensors[name][3, 1] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_scales_that_fp16_does_not_hold_are_refused_by_name(tmp_path: Path) -> None:
    tiny = _with_scale(tmp_path / "tiny", 1e-7, torch.bfloat16)
    with pytest.raises(RequestError, match=r"layers\.0\.self_attn\.q_proj has scales that fp16 does not hold, such as"):
        _export(tiny, tmp_path / "out")
    result = _export(tiny, tmp_path / "out", requantize=True, verify=False)
    assert set(result.losses) == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert max(result.losses.values()) < 1e-3
    huge = _with_scale(tmp_path / "huge", 1e6, torch.bfloat16)
    with pytest.raises(RequestError, match=r"a scale of 999424, above fp16's largest"):
        _export(huge, tmp_path / "out2", requantize=True)


def test_float32_scales_are_rounded_only_when_asked(tmp_path: Path) -> None:
    path = _compressed(tmp_path / "model", int_scheme(8), dtype=torch.float32)
    with pytest.raises(RequestError, match="scales that fp16 does not hold"):
        _export(path, tmp_path / "out")
    result = _export(path, tmp_path / "out", requantize=True)
    assert len(result.losses) == 2
    assert max(result.losses.values()) < 5e-4


def test_asymmetric_int8_is_kept_where_codes_are_near_their_zero_point(tmp_path: Path) -> None:
    path = _compressed(tmp_path / "model", int_scheme(8, False, 32))
    with pytest.raises(RequestError, match=r"codes more than 128 from their zero point.*--requantize"):
        _export(path, tmp_path / "out")
    result = _export(path, tmp_path / "out", requantize=True)
    assert 0 < max(result.losses.values()) < 0.01


def test_values_beyond_f16_are_refused(tmp_path: Path) -> None:
    model = _model("llama", tmp_path / "model", save=False)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(RequestError, match=r"up_proj\.weight has values that F16 does not hold"):
        _export(tmp_path / "model", tmp_path / "out", dense="f16")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_found(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from export.gguf import permute, writer

    monkeypatch.setattr(writer.permute, "rows", lambda count, heads: torch.arange(count))
    monkeypatch.setattr("export.gguf.readback.permute", _Order(permute.rows))
    with pytest.raises(CompressError, match=r"attn_q\.weight is .* away from the artifact's"):
        _export(made("w4_g128"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class _Order:
    """The right order of rows, for the side that checks: the module is shared with the side that was broken."""

    def __init__(self, rows: Callable[[int, int], torch.Tensor]) -> None:
        self.rows = lambda count, heads: torch.arange(count).view(heads, 2, -1).transpose(1, 2).reshape(-1)


# ---------------------------------------------------------------- families
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, biases everywhere": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama with wide heads": (
        "llama",
        {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    ),
    "llama 3": ("llama", {"rope_parameters": _LLAMA3, "head_dim": 32}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}}),
    "llama yarn": ("llama", {"rope_parameters": _YARN, "head_dim": 32}),
    "mistral": ("mistral", {"head_dim": 16, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": {**_YARN, "attention_factor": 1.3}}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("name", _FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    """Read back exactly; and where llama.cpp is there, the same logits and tokens with matrices of float32."""
    family, changes = _FAMILIES[name]
    _model(family, tmp_path / "model", **changes)
    result = _export(tmp_path / "model", tmp_path / "out", dense="f32")
    keys, tensors = _read(result.path)
    arch = keys["general.architecture"]
    assert arch == {"llama": "llama", "mistral": "llama"}.get(family, family)
    assert keys[f"{arch}.block_count"] == 2
    assert keys[f"{arch}.context_length"] == 128
    assert keys[f"{arch}.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-4)
    assert ("output.weight" in tensors) != changes.get("tie_word_embeddings", False)
    assert ("rope_freqs.weight" in tensors) == (name == "llama 3")
    assert len(tensors) == result.verification.metrics["read_tensors"] + (name == "llama 3")
    if LLAMA_CPP:
        assert result.verification.metrics["kl"] < 1e-6
        assert result.verification.metrics["same_tokens"] == result.verification.metrics["tokens"]
        assert result.verification.metrics["same_token_ids"] is True
    else:
        assert any("llama-cpp-python is not installed" in note for note in result.verification.notes)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gpt2", {}, "model type 'gpt2' is none that this target knows"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "scaled by 'dynamic'",
        ),
        ("llama", {"rope_parameters": {**_YARN, "beta_fast": 16}}, "beta_fast"),
        ("qwen2", {"rope_parameters": _LLAMA3}, "reads no rotary factors"),
        ("qwen2", {"head_dim": 32}, "4 heads of 32 are not the hidden size 64"),
        ("qwen3", {"attention_bias": True}, r"o_proj\.bias is a bias that llama\.cpp does not add"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], reason: str
) -> None:
    _model(family, tmp_path / "model", **changes)
    with pytest.raises(RequestError, match=reason):
        _export(tmp_path / "model", tmp_path / "out")
    assert export.fitting(tmp_path / "model")["gguf"] is not None
    assert not (tmp_path / "out").exists()


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _model("llama", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.extra.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"tensor model\.layers\.0\.extra\.weight belongs to no parameter"):
        _export(tmp_path / "model", tmp_path / "out")
    computed = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    save_file({**tensors, **computed}, file, metadata={"format": "pt"})
    result = _export(tmp_path / "model", tmp_path / "out", verify=False)
    assert any(set(c.modules) == set(computed) and "left out" in c.what for c in result.conversions)
    save_file({k: v for k, v in tensors.items() if "up_proj" not in k}, file, metadata={"format": "pt"})
    with pytest.raises(RequestError, match=r"up_proj\.weight is missing"):
        _export(tmp_path / "model", tmp_path / "out2")


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    _model("mistral", tmp_path / "model", sliding_window=48)
    result = _export(tmp_path / "model", tmp_path / "out", verify=False)
    keys, _ = _read(result.path)
    assert keys["llama.context_length"] == 48
    assert any("context 128 becomes 48" in c.what for c in result.conversions)


def test_tied_matrices_that_differ_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _model("llama", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(RequestError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        _export(tmp_path / "model", tmp_path / "out")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    result = _export(tmp_path / "model", tmp_path / "out", verify=False)
    assert "output.weight" not in _read(result.path)[1]


def test_export_says_how_to_run_it(made: Make, tmp_path: Path) -> None:
    result = _export(made("w4_g128"), tmp_path / "out")
    readme = (result.path / "README.md").read_text()
    assert 'Llama("out/model.gguf"' in readme
    manifest = json.loads((result.path / "export.json").read_text())
    assert manifest["gguf"]["tokenizer"] == {"model": "gpt2", "pre": "gpt-2"}
    assert set(manifest["files"]) >= {"model.gguf"}
    assert not list(result.path.glob("*.tmp"))


def test_options_are_checked(made: Make, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="option dense of target gguf"):
        _export(made("dense"), tmp_path / "out", dense="int8")
    with pytest.raises(RequestError, match="no option dtype"):
        _export(made("dense"), tmp_path / "out", dtype="f16")


def test_memory_is_one_tensor(tmp_path: Path) -> None:
    """The largest number of bytes that tensors hold at once while writing stays far below the file."""
    import tracemalloc

    _model("llama", tmp_path / "model", num_hidden_layers=12, hidden_size=256, intermediate_size=512)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    _export(tmp_path / "model", tmp_path / "warm", verify=False)
    tracemalloc.start()
    _export(tmp_path / "model", tmp_path / "out", verify=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 12_000_000
    assert peak < size / 2


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["w4_g128", "w4_g32_asymmetric", "w8_channel", "sparse_w4", "bitmap"])
def test_llama_cpp_says_the_same_tokens(made: Make, tmp_path: Path, kind: str) -> None:
    metrics = _export(made(kind), tmp_path / "out").verification.metrics
    assert metrics["float32_kl"] < 1e-6
    assert metrics["float32_same_tokens"] == metrics["tokens"]


@needs_llama_cpp
def test_a_wrong_order_of_rows_is_found_by_llama_cpp(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from export.gguf import permute

    monkeypatch.setattr(
        permute, "rows", lambda count, heads: torch.arange(count)
    )  # writer and reader agree on the wrong one
    with pytest.raises(CompressError, match="does not compute what the artifact does"):
        _export(made("w4_g128"), tmp_path / "out")


@needs_llama_cpp
def test_llama_cpp_runs_the_bundled_tokenizer(bundled: Path, tmp_path: Path) -> None:
    """Same ids as transformers on the whole held-out text."""
    from transformers import AutoTokenizer

    from export.gguf.llamacpp import Model

    shutil.copytree(bundled, tmp_path / "model")
    result = _export(tmp_path / "model", tmp_path / "out", verify=False)
    text = (bundled.parent / "texts" / "heldout.txt").read_text(encoding="utf-8")
    expected = AutoTokenizer.from_pretrained(bundled).encode(text)
    with Model(result.path / "model.gguf", 64) as model:
        assert model.tokenize(text, add_special=True) == expected
    assert len(expected) > 10_000


def test_float8_is_exact_in_float32(made: Make, tmp_path: Path) -> None:
    result = _export(made("fp8"), tmp_path / "out", dense="f32", verify=False)
    source = Source(made("fp8"))
    found = _read(result.path)[1]["blk.1.ffn_down.weight"][1]
    assert source.entries["model.layers.1.mlp.down_proj"].scheme.weights == WeightScheme(
        8, "float", True, "channel", None
    )
    assert torch.equal(found, _exactly(source.weight("model.layers.1.mlp.down_proj")))
