"""Readers of an artifact: what it says of them is tried, and nobody loads random weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMALL, VOCABULARY
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import compress
import runtime
from compress.commands.output import size_row
from compress.core.loaded_bytes import loaded_bytes
from compress.core.tensors import relative
from compress.run.plan import make_plan
from export.readers import readable_by
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.guard import GUARDS, NOTICE
from runtime.formats.quantization_config import OWN_METHOD

W4 = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 16}}
HALF = {"prune": {"method": "magnitude", "sparsity": 0.5}}
STAGES: dict[str, tuple[dict[str, Any], ...]] = {
    "w4": (W4,),
    "w3": ({"quantize": {"method": "rtn", "scheme": "W4A16", "bits": 3, "group_size": 16}},),
    "w4_sparse": ({"prune": {"method": "magnitude", "pattern": "2:4"}}, W4),
    "ragged": ({"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 20}},),
    "fp8": ({"quantize": {"method": "rtn", "scheme": "FP8"}},),
    "w8a8": ({"quantize": {"method": "rtn", "scheme": "W8A8"}},),
    "llm_int8": ({"quantize": {"method": "rtn", "scheme": "LLM.int8"}},),
    "sparse50": (HALF,),
    "structured": ({"structure": {"method": "prefix", "remove": "ffn", "keep": [96, 40, 64], "reconstruct": False}},),
    "cache": ({"kv_cache": {"keys": "int8", "values": "int8"}},),
}
#: transformers, vLLM, SGLang.
SAID = {
    "w4": ("yes", "yes", "yes"),
    "w3": ("yes", "after export", "after export"),
    "w4_sparse": ("with import runtime", "after export", "after export"),
    "ragged": ("with import runtime", "after export", "after export"),
    "fp8": ("yes", "yes", "yes"),
    "w8a8": ("yes", "yes", "yes"),
    "llm_int8": ("with import runtime", "no", "no"),
    "sparse50": ("with import runtime", "after export", "after export"),
    "structured": ("no", "no", "no"),
    "cache": ("yes", "yes", "yes"),
}
LOAD = """
import json, os, sys
if sys.argv[1] == "runtime":
    import runtime
from transformers import AutoModelForCausalLM
answers = {}
for path in sys.argv[2:]:
    try:
        AutoModelForCausalLM.from_pretrained(path)
        answers[os.path.basename(path)] = True
    except Exception as error:
        answers[os.path.basename(path)] = False
print(json.dumps(answers))
"""


def hows(readers: list[dict[str, str]]) -> dict[str, str]:
    return {row["name"]: row["how"] for row in readers}


def loaded(paths: list[Path], before: str) -> dict[str, bool]:
    root = str(Path(runtime.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, before, *map(str, paths)], cwd=root, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_is_said_of_readers_is_so(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint(dtype=torch.float32)
    paths = []
    for name, stages in STAGES.items():
        made = compress.apply(recipe(source, *stages), output=tmp_path / name, quiet=True)
        paths.append(made.path)
        told = hows(made.manifest["readable_by"])
        assert (told["transformers"], told["vLLM"], told["SGLang"]) == SAID[name], name
        assert told["this runtime"] == "yes"
        assert torch.isfinite(runtime.load(made.path).logits(torch.arange(1, 5)[None])).all()
        planned = compress.plan(recipe(source, *stages), output=tmp_path / f"{name}-planned").readable_by
        # Whether GGUF's half-precision scales hold an artifact's is known once there are scales.
        assert hows(planned) | {"llama.cpp": told["llama.cpp"]} == told
    plain = loaded(paths, "nothing")
    assert plain == {name: said[0] == "yes" for name, said in SAID.items()}
    assert loaded(paths, "runtime") == {name: said[0] != "no" for name, said in SAID.items()}


@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("llama", STAGES["w4_sparse"]),
        ("llama", STAGES["sparse50"]),
        ("llama", STAGES["llm_int8"]),
        ("gpt2", STAGES["fp8"]),
        ("gpt2", STAGES["w8a8"]),
    ],
    ids=["2:4 int4", "sparse50", "LLM.int8", "codes called weight, float8", "codes called weight, int8"],
)
def test_readers_that_do_not_know_our_formats_refuse(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, stages: Any
) -> None:
    monkeypatch.setitem(SMALL, "gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4})
    path = compress.apply(recipe(make_checkpoint(family), *stages), output=tmp_path / "out", quiet=True).path
    guarded = load_file(path / GUARDS)
    layers = [layer["name"] for layer in json.loads((path / "compress.json").read_text())["layers"]]
    assert set(guarded) == {NOTICE, *(f"{name}.weight" for name in layers)}
    assert {value.numel() for value in guarded.values()} == {0}
    assert NOTICE not in Checkpoint(path).names()
    again, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(told.values())
    ids = torch.arange(VOCABULARY // 2)[None, :16]
    with torch.inference_mode():
        engine = runtime.load(path).engine  # modules: in the native decoder's float32 some inputs become other codes
        found = getattr(engine, "torch_engine", engine).logits(ids)
        assert relative(found, again(ids).logits) < 0.03  # rounding to bf16
    monkeypatch.delitem(AUTO_QUANTIZER_MAPPING, OWN_METHOD)  # as without `import runtime`
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, OWN_METHOD)
    for kind in (AutoModelForCausalLM, type(again), AutoModel):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            kind.from_pretrained(path)


def test_an_artifact_without_guards_still_loads(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    path = compress.apply(recipe(make_checkpoint(), HALF), output=tmp_path / "out", quiet=True).path
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != GUARDS}
    ids = torch.arange(1, 9)[None]
    before = runtime.load(path).logits(ids)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / GUARDS).unlink()
    (path / "compress.json").unlink()
    assert torch.equal(runtime.load(path).logits(ids), before)
    assert AutoModelForCausalLM.from_pretrained(path).config.quantization_config.quant_method == OWN_METHOD


def test_the_plan_says_readers_and_engine(make_checkpoint: Any, recipe: Any) -> None:
    from compress.recipe import load

    source = make_checkpoint()
    plan = make_plan(load(recipe(source, W4, STAGES["cache"][0])), device="cpu", readers=readable_by)
    rows = {row["name"]: row for row in plan.readable_by}
    assert rows["vLLM"]["how"] == "yes"
    assert "without its cache policy" in rows["vLLM"]["note"]
    assert plan.engine.startswith("cpu: the decoder in C")
    evict = {"score": "streaming", "tokens": 64}
    evicting = make_plan(load(recipe(source, W4, {"kv_cache": {"evict": evict}})), device="cpu", readers=readable_by)
    assert evicting.engine.startswith("cpu: the decoder in C")
    merged = {"kv_cache": {"clusters": {"ratio": 0.5}}}
    by_cluster = make_plan(load(recipe(source, W4, merged)), device="cpu", readers=readable_by)
    assert by_cluster.engine.startswith("cpu: transformers' modules")
    assert "holds no cache whose policy says to merge tokens" in by_cluster.engine
    plain = make_plan(load(recipe(source, W4)), device="cpu", readers=readable_by)
    assert plain.engine.startswith("cpu: the decoder in C")
    dense = make_plan(load(recipe(source, *STAGES["structured"])), device="cpu", readers=readable_by)
    assert dense.engine.startswith("cpu: the decoder in C")


def test_sizes_count_what_is_loaded(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    made = compress.apply(recipe(make_checkpoint(), W4), output=tmp_path / "out", quiet=True)
    held = made.manifest["bytes"]
    assert held["after"] == held["total"] == Checkpoint(made.path).total_bytes
    assert (held["draft"], held["cache_files"]) == (0, 0)
    tokenizer = ("tokenizer.json", "tokenizer_config.json")
    assert held["tokenizer"] == sum((made.path / name).stat().st_size for name in tokenizer)


def test_the_draft_and_the_calibrated_cache_count(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    save_file({"head": torch.zeros(500, 10)}, tmp_path / "draft" / "heads.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    manifest = {"draft": {"drafter": {"model": "draft"}}, "kv_cache": {"calibrated": {"gates": [1, 2]}}}
    held = loaded_bytes(tmp_path, manifest, 100_000, 10_000)
    calibrated = len('{"gates":[1,2]}')
    assert held == {
        "before": 100_000, "after": 10_000, "draft": 20_000, "cache_files": calibrated, "total": 30_000 + calibrated, "tokenizer": 2,
    }  # fmt: skip
    note = size_row(held)[-1]
    assert "3.33 times smaller" in note
    assert "model 10.00 kB + draft 20.00 kB" in note
    assert "without the tokenizer, 2 B" in note
    without = loaded_bytes(tmp_path, {"draft": {"drafter": {"method": "lookup"}}}, 100_000, 10_000)
    assert (without["draft"], without["total"]) == (0, 10_000)


def test_what_is_not_installed_is_named_and_not_imported(tiny_artifact, monkeypatch):
    """An artifact's run ends by telling who reads it, also where the extras of the exports are missing."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr("export.target.importlib.util.find_spec", lambda name: None)
    (row,) = [row for row in readable_by(tiny_artifact, {}) if row["name"] == "llama.cpp"]
    assert row["how"] == "after export"
    assert row["note"].startswith(
        "compress export --target gguf, which needs gguf, which is not installed: pip install "
    )
