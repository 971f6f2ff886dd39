"""Recipes that are `model_free`: what the model's own code would have made of a checkpoint, and any architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES
from runs import same_bytes
from safetensors.torch import save_file
from torch import nn
from unknown_models import linear_layers, write_unknown

import compress
import runtime
from compress.cli import main
from compress.core.resources import recipes_directory
from compress.model.tensor_model import TensorModel, outermost_lists, routers_by_name
from compress.recipe import load
from compress.run.plan import make_plan
from compress.run.run import apply
from compress.weights import artifact, block_pass, shard
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
    modules = sorted({name.rpartition(".")[0] for name in free if name.rpartition(".")[2].startswith("weight_")})
    entries = [parse(config.pop("quantization_config"), modules) for config in configs]
    assert configs[0] == configs[1]
    assert entries[0] == entries[1]
    loaded = [
        runtime.load(tmp_path / name, kernels="reference").logits(torch.arange(3, 30)[None])
        for name in ("free", "known")
    ]
    assert torch.equal(*loaded)


# ------------------------------------------------------------ and those that it does not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_architecture(tmp_path: Path, dtype: torch.dtype) -> None:
    before = write_unknown(tmp_path / "model", dtype)
    made = compress.apply(request(tmp_path / "model", rtn(**W4, scales="minmax")), output=tmp_path / "out", quiet=True)
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
    assert made.metrics == {}


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
    made = compress.apply(request(tmp_path / "model", rtn(**W4)), output=tmp_path / "out", quiet=True)
    assert {layer["name"] for layer in made.manifest["layers"]} == {"up", "down"}
    stored = tensors(tmp_path / "out")
    assert equal(stored["up.bias"], source["up.bias"])
    assert equal(stored["steps"], source["steps"])


@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe"])
def test_routers_stay_beside_experts_in_one_tensor(tmp_path: Path, family: str) -> None:
    source = next(one for one in FAMILIES if one.name == family).write(tmp_path / "model")
    made = compress.apply(request(source, rtn(**W4)), output=tmp_path / "out", quiet=True)
    names = {layer["name"] for layer in made.manifest["layers"]}
    assert names
    assert not any("router" in name for name in names)
    assert runtime.load(tmp_path / "out").logits(torch.arange(3, 30)[None]).isfinite().all()


def write(path: Path, found: dict[str, torch.Tensor], **config: Any) -> Path:
    path.mkdir()
    save_file({name: tensor.clone() for name, tensor in found.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def kinds(path: Path) -> dict[str, str]:
    """{name: class} of the matrices of a checkpoint, routers and the blocks they are in marked."""
    model = TensorModel(Checkpoint(path), torch.float32)
    lists = [name for name, _ in outermost_lists(model)]
    choosing = routers_by_name(model)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            kind = "router" if name in choosing else type(module).__name__
            found[name] = f"{kind} in a block" if any(name.startswith(f"{own}.") for own in lists) else kind
    return found


def test_what_names_tell(tmp_path: Path) -> None:
    wide = torch.zeros(48, 32)
    source = write(
        tmp_path / "model",
        {
            "output.weight": torch.zeros(99, 32), "embed_out.weight": wide, "wte.weight": wide, "plain.weight": wide,
            # Numbers with a gap and zeros in front, a block without a layer, one with as many outputs as there are tokens.
            "layers.00.up.weight": torch.zeros(99, 32), "layers.02.scale": torch.zeros(3), "layers.03.rel_attention_bias.weight": wide,
            "layers.03.moe.router.layer.weight": torch.zeros(5, 32), "layers.03.moe.experts.0.up.weight": wide,
            "layers.03.moe.experts.4.up.weight": wide, "layers.03.shared_gate.weight": torch.zeros(1, 32),
            "net.0.weight": wide, "net.2.weight": wide, "stack.\u00b2.up.weight": wide,
        },
        llm_config={"vocab_size": 99},
    )  # fmt: skip
    assert kinds(source) == {
        "output": "Embedding", "embed_out": "Linear", "wte": "Embedding", "plain": "Linear",
        "layers.00.up": "Linear in a block", "layers.03.rel_attention_bias": "Embedding in a block",
        "layers.03.moe.router.layer": "router in a block", "layers.03.moe.experts.0.up": "Linear in a block",
        "layers.03.moe.experts.4.up": "Linear in a block", "layers.03.shared_gate": "Linear in a block",
        "net.0": "Linear", "net.2": "Linear", "stack.\u00b2.up": "Linear",
    }  # fmt: skip


def test_numbers_with_gaps(tmp_path: Path) -> None:
    """Every tensor is there, once, and what is fused shares a global scale in blocks and outside."""
    names = [f"{home}.{part}_proj.weight" for home in ("layers.0", "layers.2", "layers.03", "tail") for part in "qkv"]
    found = {name: torch.randn(64, 64) * (1 + number) for number, name in enumerate(names)}
    source = write(tmp_path / "model", {**found, "layers.03.mask": torch.full((4,), -torch.inf)})
    made = compress.apply(request(source, rtn(scheme="NVFP4A16")), output=tmp_path / "out", quiet=True)
    stored = tensors(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 4, (
        "a shard a block, and one for what is in none"
    )
    assert {layer["name"] for layer in made.manifest["layers"]} == {name.removesuffix(".weight") for name in names}
    assert len(stored) == 3 * len(names) + 1
    scales = {name: float(value) for name, value in stored.items() if name.endswith("global_scale")}
    for home in ("layers.0", "layers.2", "layers.03", "tail"):
        assert len({scale for name, scale in scales.items() if name.startswith(f"{home}.")}) == 1
    assert len(set(scales.values())) == 4


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.int8, torch.bool, torch.complex64, torch.float64])
def test_tensors_of_any_dtype_are_copied(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randint(0, 2, (16,)).to(dtype)
    found = {
        f"layers.{n}.{leaf}": tensor
        for n in range(2)
        for leaf, tensor in (("up.weight", torch.randn(32, 32)), ("own", value))
    }
    source = write(
        tmp_path / "model", {name: tensor.clone() for name, tensor in found.items()} | {"own": value.clone()}
    )
    compress.apply(request(source, rtn(**W4)), output=tmp_path / "out", quiet=True)
    stored = tensors(tmp_path / "out")
    assert equal(stored["layers.1.own"], value)
    assert equal(stored["own"], value)


@pytest.mark.parametrize("leaf", ["up.weight", "up.scale"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_without_scales_are_refused(tmp_path: Path, leaf: str, dtype: torch.dtype) -> None:
    source = write(
        tmp_path / "model",
        {"layers.0.down.weight": torch.randn(32, 32), f"layers.0.{leaf}": torch.randn(32, 32).to(dtype)},
    )
    with pytest.raises(RequestError, match=rf"layers\.0\.{leaf} holds numbers of torch\.float8.*quantization_config"):
        compress.apply(request(source, rtn(**W4)), output=tmp_path / "out", quiet=True)


@pytest.mark.parametrize(
    ("head", "config", "targets", "allowed"),
    [
        (True, {"tie_word_embeddings": False}, ["tokens", "lm_head"], True),
        (True, {}, ["tokens"], True),
        (True, {"text_config": {"tie_word_embeddings": True}}, ["lm_head"], False),
        (False, {}, ["tokens"], False),
        (False, {}, ["positions_emb"], True),
    ],
)
def test_tables_that_may_be_heads_too(
    tmp_path: Path, head: bool, config: dict[str, Any], targets: list[str], allowed: bool
) -> None:
    found = {
        "tokens.weight": torch.randn(99, 32),
        "positions_emb.weight": torch.randn(64, 32),
        "layers.0.up.weight": torch.randn(32, 32),
    }
    found |= {"lm_head.weight": torch.randn(99, 32)} if head else {}
    recipe = request(write(tmp_path / "model", found, vocab_size=99, **config), rtn(**W4, targets=targets, ignore=[]))
    if allowed:
        made = compress.apply(recipe, output=tmp_path / "out", quiet=True)
        assert {layer["name"] for layer in made.manifest["layers"]} == set(targets)
        return
    with pytest.raises(
        RequestError, match=f"model_free: {targets[-1]} may be both the token embedding and the output head"
    ):
        compress.apply(recipe, output=tmp_path / "out", quiet=True)


def test_code_that_stays_behind_is_named(tmp_path: Path) -> None:
    write_unknown(tmp_path / "model")
    (tmp_path / "model" / "modeling_unheard_of.py").write_text("raise SystemExit")
    assert any(
        "modeling_unheard_of.py stays behind" in text
        for text in make_plan(load(request(tmp_path / "model", rtn(**W4)))).warnings
    )


@pytest.mark.parametrize("name", ["trunk.cells.1.fused", "trunk.cells.1.mix.v_proj.bias", "trunk.counter"])
def test_a_copy_that_the_disk_changes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_unknown(tmp_path / "model")

    def save(found: dict[str, torch.Tensor], *rest: Any, **more: Any) -> None:
        save_file({own: tensor + 1 if own == name else tensor for own, tensor in found.items()}, *rest, **more)

    monkeypatch.setattr(shard, "save_file", save)
    with pytest.raises(CompressError, match=f"tensor {name} read back from the disk is not the one that was written"):
        compress.apply(request(tmp_path / "model", rtn(**W4)), output=tmp_path / "out", quiet=True)


def test_a_config_that_says_otherwise_than_the_files_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_unknown(tmp_path / "model")
    real = artifact.config

    def without(weights: Any, entries: Any) -> dict[str, Any]:
        return real(weights, {name: entry for name, entry in entries.items() if name != "ears.1.proj"})

    monkeypatch.setattr(artifact, "config", without)
    with pytest.raises(CompressError, match=r"do not agree on ears\.1\.proj\.weight"):
        compress.apply(request(tmp_path / "model", rtn(**W4)), output=tmp_path / "out", quiet=True)


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
        made = apply(load(recipe), output=tmp_path / scheme, quiet=True, readers=readable_by)
        assert made.manifest["readable_by"] == planned


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_unknown(tmp_path / "model")
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(json.dumps(request(tmp_path / "model", rtn(**W4))))

    def run(*arguments: object) -> tuple[int, str, str]:
        return main([*map(str, arguments)]), *capsys.readouterr()

    code, said, errors = run("plan", recipe)
    assert code == 0, errors
    assert "trunk.cells.*.fused" in said, "what is copied though it is large"
    code, said, errors = run("apply", recipe, "--output", output)
    assert code == 0, errors
    assert "compress inspect" in said
    assert "compress generate" not in said
    assert run("inspect", output, "--verify")[0] == 0
    code, _, errors = run("generate", output, "text")
    assert code != 0
    assert "unheard_of" in errors


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
        ([{"prune": {"method": "wanda", "sparsity": 0.5}}, rtn(**W4)], {}, "stages.0.prune: wanda"),
        ([{"prune": {"method": "magnitude", "sparsity": 0.5, "allocation": "owl"}}], {}, "allocation uniform"),
        ([HALF, {"quantize": {"method": "gptq", **W4}}], {}, "stages.1.quantize: gptq"),
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
    [
        (["a.b", "a.b.c"], "tensor a.b.c has the name of another tensor as its prefix"),
        (["x.type.weight"], "tensor x.type.weight: without its code a model cannot have a part that is called 'type'"),
    ],
)
def test_names_that_no_module_can_have_are_refused(tmp_path: Path, names: list[str], words: str) -> None:
    (tmp_path / "model").mkdir()
    found = {name: torch.randn(32, 32) for name in (*names, "up.weight")}
    save_file(found, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(CompressError, match=words):
        compress.apply(request(tmp_path / "model", rtn(**W4)), output=tmp_path / "out", quiet=True)
