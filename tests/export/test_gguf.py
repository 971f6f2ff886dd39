"""`--target gguf`: what the file holds is the artifact bit for bit, what changes is said before, and llama.cpp computes the same."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import exactly, export_gguf, read_gguf, save_compressed, unrotate
from weight_cases import int_scheme

from export.source import Source
from export.target import Conversion
from runtime.errors import CompressError, RequestError
from runtime.formats.scheme import GridScheme

gguf = pytest.importorskip("gguf")
LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None
needs_llama_cpp = pytest.mark.skipif(not LLAMA_CPP, reason="llama-cpp-python is not installed")
Make = Callable[..., Path]


@pytest.mark.sampled(2, 3)
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
    result = export_gguf(made(kind), tmp_path / "out")
    source = Source(made(kind))
    _, tensors = read_gguf(result.path)
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
            found = found if heads is None else unrotate(found, heads)
            module = f"model.layers.{block}.{long}"
            if module not in source.entries:
                expected = source.dense(f"{module}.weight").float()
            elif kind == "fp8":  # bfloat16 as the artifact itself gives it in its own dtype
                expected = source.weight(module).dequantize().float()
            else:
                expected = exactly(source.weight(module))
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
        result = export_gguf(made(kind), tmp_path / kind, verify=False, **options)
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
    result = export_gguf(made("w4_g32_asymmetric"), tmp_path / "out", asymmetric="q4_1")
    assert result.facts["main_type"] == "Q4_1"
    assert len(result.losses) == 14
    assert 0 < max(result.losses.values()) < 1e-3
    assert any("minima rounded to fp16" in c.what and not c.exact for c in result.conversions)


def test_asymmetric_int4_becomes_q4_1_by_itself_where_that_is_exact(tmp_path: Path) -> None:
    path = save_compressed(tmp_path / "model", int_scheme(4, False, 32))
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_scale"):  # powers of two: every minimum is an fp16 number
            tensors[name] = torch.full_like(tensors[name], 0.125)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    result = export_gguf(path, tmp_path / "out")
    assert "Q4_1" in result.facts["types"]
    assert "Q5_0" not in result.facts["types"]
    assert result.losses == {}


@pytest.mark.parametrize(("dense", "kind"), [("bf16", "BF16"), ("f16", "F16"), ("f32", "F32")])
def test_dense_type_is_a_choice(made: Make, tmp_path: Path, dense: str, kind: str) -> None:
    result = export_gguf(made("dense"), tmp_path / "out", dense=dense)
    _, tensors = read_gguf(result.path)
    assert tensors["blk.0.ffn_up.weight"][0] == kind
    assert tensors["blk.0.attn_norm.weight"][0] == "F32"


def test_rows_that_are_no_multiple_of_32_are_dense(tmp_path: Path) -> None:
    path = save_compressed(tmp_path / "model", int_scheme(4, group=16), "down_proj", intermediate_size=80)
    result = export_gguf(path, tmp_path / "out")
    _, tensors = read_gguf(result.path)
    kind, found = tensors["blk.0.ffn_down.weight"]
    assert kind == "BF16"
    assert torch.equal(found, Source(path).weight("model.layers.0.mlp.down_proj").dequantize().float())
    assert any("no multiple of 32" in c.what for c in result.conversions)


def test_export_says_how_to_run_it(made: Make, tmp_path: Path) -> None:
    result = export_gguf(made("w4_g128"), tmp_path / "out")
    readme = (result.path / "README.md").read_text()
    assert 'Llama("out/model.gguf"' in readme
    manifest = json.loads((result.path / "export.json").read_text())
    assert manifest["gguf"]["tokenizer"] == {"model": "gpt2", "pre": "gpt-2"}
    assert set(manifest["files"]) >= {"model.gguf"}
    assert not list(result.path.glob("*.tmp"))


def test_options_are_checked(made: Make, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"\bdense\b"):
        export_gguf(made("dense"), tmp_path / "out", dense="int8")
    with pytest.raises(RequestError, match=r"\bdtype\b"):
        export_gguf(made("dense"), tmp_path / "out", dtype="f16")


def test_one_tensor_is_in_memory_at_a_time(made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is made, at most the one written before it is still there."""
    import weakref

    from export.gguf import writer

    made_before: list[Any] = []
    alive: list[int] = []
    encode = writer.encode

    def watched(*arguments: Any) -> Any:
        alive.append(sum(one() is not None for one in made_before))
        data, loss = encode(*arguments)
        made_before.append(weakref.ref(data))
        return data, loss

    monkeypatch.setattr(writer, "encode", watched)
    export_gguf(made("w4_g128"), tmp_path / "out", verify=False)
    assert len(alive) == 20
    assert max(alive) <= 1


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["w4_g128", "w4_g32_asymmetric", "w8_channel", "sparse_w4", "bitmap"])
def test_llama_cpp_says_the_same_tokens(made: Make, tmp_path: Path, kind: str) -> None:
    metrics = export_gguf(made(kind), tmp_path / "out").verification.metrics
    assert metrics["float32_kl"] < 1e-6
    assert metrics["float32_same_tokens"] == metrics["tokens"]


@needs_llama_cpp
def test_a_wrong_order_of_rows_is_found_by_llama_cpp(
    made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from export.gguf import families

    monkeypatch.setattr(
        families, "permuted_rows", lambda count, heads: torch.arange(count)
    )  # writer and reader agree on the wrong one
    with pytest.raises(CompressError, match=r"\bKL\b"):
        export_gguf(made("w4_g128"), tmp_path / "out")


@needs_llama_cpp
def test_llama_cpp_runs_the_bundled_tokenizer(bundled: Path, tmp_path: Path) -> None:
    """Same ids as transformers on the whole held-out text."""
    from transformers import AutoTokenizer

    from export.gguf.check import LlamaModel as Model

    shutil.copytree(bundled, tmp_path / "model")
    result = export_gguf(tmp_path / "model", tmp_path / "out", verify=False)
    text = (bundled.parent / "texts" / "heldout.txt").read_text(encoding="utf-8")
    expected = AutoTokenizer.from_pretrained(bundled).encode(text)
    with Model(result.path / "model.gguf", 64) as model:
        assert model.tokenize(text) == expected
    assert len(expected) > 10_000


def test_float8_is_exact_in_float32(made: Make, tmp_path: Path) -> None:
    result = export_gguf(made("fp8"), tmp_path / "out", dense="f32", verify=False)
    source = Source(made("fp8"))
    found = read_gguf(result.path)[1]["blk.1.ffn_down.weight"][1]
    assert source.entries["model.layers.1.mlp.down_proj"].scheme.weights == GridScheme(
        8, "float", True, "channel", None
    )
    assert torch.equal(found, exactly(source.weight("model.layers.1.mlp.down_proj")))
