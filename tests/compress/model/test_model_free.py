"""Recipes that are `model_free`: what the model's own code would have made of a checkpoint, and any architecture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES
from runs import same_bytes
from safetensors.torch import save_file
from unknown_models import linear_layers, write_unknown

import compress
from compress.core.resources import recipes_directory
from compress.recipe import load
from compress.run.plan import make_plan
from compress.run.run import apply
from compress.weights import block_pass
from export.readers import readable_by
from runtime import formats
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError
from runtime.formats.quantization_config import parse

BUNDLED = recipes_directory() / "checkpoints" / "stdlib-qwen3-4m"
W4 = {"scheme": "W4A16", "group_size": 32}
HALF = {"prune": {"method": "magnitude", "pattern": "2:4"}}


def request(model: Path, *stages: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"name": "row", "model": str(model), "model_free": True, "stages": list(stages), **keys}


def rtn(**fields: Any) -> dict[str, Any]:
    return {"quantize": {"method": "rtn", **fields}}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint(path)
    return {name: checkpoint.get(name) for name in checkpoint.names()}


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


# ------------------------------------------------------------ architectures that transformers knows
@pytest.mark.parametrize(
    ("family", "stages"),
    [
        ("bundled", [rtn(**W4)]),
        ("bundled", [rtn(scheme="W8A8-INT8")]),
        ("bundled", [HALF, rtn(scheme="FP8_DYNAMIC")]),
        pytest.param("bundled", [HALF], marks=pytest.mark.slow),
        ("mixtral", [rtn(scheme="NVFP4A16")]),  # one global scale for what is fused
        pytest.param("qwen3_moe", [rtn(**W4)], marks=pytest.mark.slow),
        pytest.param("deepseek_v3", [rtn(scheme="NVFP4A16")], marks=pytest.mark.slow),
        pytest.param("deepseek_v3", [rtn(scheme="W8A16")], marks=pytest.mark.slow),
        pytest.param(
            "llama", [rtn(scheme="MXFP4A16", targets=["*q_proj", "lm_head"], ignore=[])], marks=pytest.mark.slow
        ),
    ],
)
def test_it_makes_what_the_code_of_the_model_makes(tmp_path: Path, family: str, stages: list[dict[str, Any]]) -> None:
    source = BUNDLED
    if family != "bundled":
        source = next(one for one in FAMILIES if one.name == family).write(tmp_path / "model")
    compress.apply(request(source, *stages), output=tmp_path / "free", quiet=True)
    compress.apply(request(source, *stages) | {"model_free": False}, output=tmp_path / "known", quiet=True)
    free, known = tensors(tmp_path / "free"), tensors(tmp_path / "known")
    assert free.keys() == known.keys()
    assert [name for name in free if not equal(free[name], known[name])] == []
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("free", "known")]
    modules = [name.removesuffix(".weight") for name in Checkpoint(source).names() if name.endswith(".weight")]
    entries = [parse(config.pop("quantization_config"), modules) for config in configs]
    assert configs[0] == configs[1]
    assert {name: entries[0][name] for name in entries[1] if name in entries[0]} == entries[0], "the same schemes"
    compressed = {layer["name"] for layer in json.loads((tmp_path / "known" / "compress.json").read_text())["layers"]}
    assert entries[0].keys() >= compressed & set(modules)


# ------------------------------------------------------------ and those that it does not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_architecture(tmp_path: Path, dtype: torch.dtype) -> None:
    before = write_unknown(tmp_path / "model", dtype)
    artifact = compress.apply(
        request(tmp_path / "model", rtn(**W4, scales="minmax")), output=tmp_path / "out", quiet=True
    )
    after = tensors(tmp_path / "out")
    entries = parse(json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"], linear_layers())
    assert entries.keys() == linear_layers()
    for name in linear_layers():
        weight, entry = before.pop(f"{name}.weight"), entries[name]
        stored = {
            key.removeprefix(f"{name}."): value for key, value in after.items() if key.startswith(f"{name}.weight")
        }
        found = formats.get(entry.format).unpack(stored, entry.scheme, tuple(weight.shape), dtype).dequantize()
        groups = weight.float().view(len(weight), -1, 32)
        scale = (groups.abs().amax(-1, keepdim=True) / 7.5).to(dtype).float()
        expected = ((groups / scale).round().clamp(-8, 7) * scale).view_as(weight)
        torch.testing.assert_close(found.float(), expected.to(dtype).float(), rtol=1e-2, atol=1e-6)
        after = {key: value for key, value in after.items() if key not in {f"{name}.{part}" for part in stored}}
    assert after.keys() == before.keys()
    assert [name for name in before if not equal(before[name], after[name])] == [], "the rest is copied"
    assert artifact.metrics == {}


def test_engines_find_the_layers_by_name(tmp_path: Path) -> None:
    """Code that nobody has read may have linear layers that names do not tell: "Linear" would mean those too."""
    write_unknown(tmp_path / "model")
    compress.apply(request(tmp_path / "model", rtn(scheme="FP8_DYNAMIC")), output=tmp_path / "out", quiet=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    (group,) = config["config_groups"].values()
    assert set(group["targets"]) == linear_layers()


def test_parts_of_what_engines_fuse_share_a_global_scale(tmp_path: Path) -> None:
    write_unknown(tmp_path / "model")
    compress.apply(request(tmp_path / "model", rtn(scheme="NVFP4A16")), output=tmp_path / "out", quiet=True)
    stored = tensors(tmp_path / "out")

    def scale(name: str) -> float:
        return float(stored[f"trunk.cells.1.{name}.weight_global_scale"])

    assert scale("mix.q_proj") == scale("mix.k_proj") == scale("mix.v_proj") != scale("mix.out")
    assert scale("experts.2.w1") == scale("experts.2.w3") != scale("experts.2.w2")


def test_a_checkpoint_without_lists(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    source = {
        "up.weight": torch.randn(64, 32),
        "up.bias": torch.randn(64),
        "down.weight": torch.randn(32, 64),
        "steps": torch.tensor(7),
    }
    save_file(source, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text("{}")
    artifact = compress.apply(request(tmp_path / "model", rtn(**W4)), output=tmp_path / "out", quiet=True)
    assert {layer["name"] for layer in artifact.manifest["layers"]} == {"up", "down"}
    stored = tensors(tmp_path / "out")
    assert equal(stored["up.bias"], source["up.bias"])
    assert equal(stored["steps"], source["steps"])


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_unknown(tmp_path / "model")
    recipe = request(tmp_path / "model", HALF, rtn(**W4))
    compress.apply(recipe, output=tmp_path / "whole", quiet=True)
    real, begun = block_pass.run_block, list[int]()

    def run(job: Any, index: int, states: Any) -> Any:
        begun.append(index)
        if len(begun) == 4:
            raise KeyboardInterrupt
        return real(job, index, states)

    monkeypatch.setattr(block_pass, "run_block", run)
    with pytest.raises(KeyboardInterrupt):
        compress.apply(recipe, output=tmp_path / "out", quiet=True)
    compress.apply(recipe, output=tmp_path / "out", resume=True, quiet=True)
    assert begun == [0, 1, 2, 3, 3, 4], "no block twice"
    same_bytes(tmp_path / "whole", tmp_path / "out")


def test_readers(tmp_path: Path) -> None:
    write_unknown(tmp_path / "model")
    for scheme, how in (("W4A16", "yes"), ("DF11", "no")):
        recipe = request(tmp_path / "model", rtn(scheme=scheme, **({"group_size": 32} if scheme == "W4A16" else {})))
        planned = make_plan(load(recipe), readers=readable_by).readable_by
        rows = {row["name"]: (row["how"], row["note"]) for row in planned}
        assert rows["this runtime"] == ("no", "transformers has no code for model_type unheard_of")
        assert rows["vLLM"][0] == rows["SGLang"][0] == how
        artifact = apply(load(recipe), output=tmp_path / scheme, quiet=True, readers=readable_by)
        assert artifact.manifest["readable_by"] == planned


def test_the_command_line(tmp_path: Path) -> None:
    write_unknown(tmp_path / "model")
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(json.dumps(request(tmp_path / "model", rtn(**W4))))

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "compress.cli", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    plan = run("plan", recipe)
    assert plan.returncode == 0, plan.stderr
    assert "trunk.cells.*.fused" in plan.stdout, "what is copied though it is large"
    done = run("apply", recipe, "--output", output)
    assert done.returncode == 0, done.stderr
    assert "compress inspect" in done.stdout
    assert "compress generate" not in done.stdout
    assert run("inspect", output, "--verify").returncode == 0
    refused = run("generate", output, "text")
    assert refused.returncode != 0
    assert "unheard_of" in refused.stderr


# ------------------------------------------------------------ what it cannot be
@pytest.mark.parametrize(
    ("stages", "keys", "words"),
    [
        ([rtn(**W4)], {"evaluate": {"samples": 4}}, "evaluate: evaluate runs the model"),
        ([rtn(**W4)], {"sample": "x"}, "sample: sample runs the model"),
        ([rtn(**W4), {"draft": {"method": "distillspec"}}], {}, "draft runs the model"),
        ([{"structure": {"remove": "ffn", "method": "obs", "keep": 24}}], {}, "structure runs the model"),
        ([{"quantize": {"method": "gptq", **W4}}], {}, "stages.0.quantize: gptq"),
        ([rtn(scheme="NVFP4")], {}, "is calibrated on what layers read"),
        ([rtn(scheme="FP8")], {}, "is calibrated on what layers read"),
        ([rtn(bits=3.5, group_size=32)], {}, "is calibrated on what layers read"),
        ([rtn(**W4, objective="propagated")], {}, "is calibrated on what layers read"),
        ([{"prune": {"method": "wanda", "sparsity": 0.5}}], {}, "stages.0.prune: wanda"),
        ([rtn(**W4, targets=["*.gone"])], {}, "matches no module"),
    ],
)
def test_what_runs_the_model_is_refused(
    tmp_path: Path, stages: list[dict[str, Any]], keys: dict[str, Any], words: str
) -> None:
    write_unknown(tmp_path / "model")
    with pytest.raises(RequestError, match=words.replace(".", r"\.").replace("*", r"\*")):
        compress.apply(request(tmp_path / "model", *stages, **keys), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_weights_stored_the_other_way_are_refused(tmp_path: Path) -> None:
    source = next(one for one in FAMILIES if one.name == "gpt2").write(tmp_path / "model")
    with pytest.raises(
        RequestError, match=r"model_free: .* stores transformer\.h\.0\.attn\.c_attn as \[inputs, outputs\]"
    ):
        compress.apply(request(source, rtn(**W4)), output=tmp_path / "out", quiet=True)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a.b", "a.b.c"], "a.b"), (["x.type.weight"], "type")],
)
def test_names_that_no_module_can_have_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    (tmp_path / "model").mkdir()
    found = {name: torch.randn(32, 32) for name in (*names, "up.weight")}
    save_file(found, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(CompressError, match=words):
        compress.apply(request(tmp_path / "model", rtn(**W4)), output=tmp_path / "out", quiet=True)
