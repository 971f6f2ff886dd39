"""Routed experts: what each is calibrated on, what becomes of those that read too little, and how artifacts name them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES

import compress
import runtime
from compress.distill.draft.cut import cut_checkpoint
from compress.model.input_statistics import InputGroup, collect
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.engines.blueprint import Blueprint
from runtime.errors import CompressError
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.experts import Experts, Layout, find_fused, unfuse

W4 = {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}
STARVED = 3


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i}: the square of {i} is {i * i}, its double {2 * i}.\n" for i in range(200)))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose routers send nothing to one expert."""
    from safetensors.torch import load_file, save_file

    path = next(f for f in FAMILIES if f.name == "gpt_oss").write(tmp_path_factory.mktemp("starved") / "model")
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith("router.bias")]:
        tensors[name][STARVED] = -1e4
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _apply(source: Path, text: Path, output: Path, stage: dict[str, Any] = W4, **experts: Any) -> Any:
    calibration = {"data": str(text), "samples": 8, "sequence_length": 32, "batch_size": 4, "experts": experts}
    return compress.apply(
        {"name": "test", "model": str(source), "calibration": calibration, "stages": [stage]}, output=output, quiet=True
    )


def _weights(path: Path) -> dict[str, torch.Tensor]:
    module = Blueprint(Artifact(path), torch.device("cpu"), "reference", None, False).build_module()
    return {n: m.dequantize() for n, m in module.named_modules() if isinstance(m, CompressedLinear)}


def _notes(artifact: Any, number: int) -> list[dict[str, Any]]:
    return [line["notes"] for line in artifact.manifest["layers"] if f".layers.0.mlp.experts.{number}." in line["name"]]


@pytest.mark.slow
def test_a_starved_expert_is_calibrated_on_all_tokens(source: Path, text: Path, tmp_path: Path) -> None:
    shared = _apply(source, text, tmp_path / "shared")
    everyone = _apply(source, text, tmp_path / "all", tokens="all")
    assert any("1 of 4 experts read fewer than 32 tokens" in warning for warning in shared.warnings)
    assert [(note["tokens"], note["starved"]) for note in _notes(shared, STARVED)] == [(256, "shared")] * 3
    assert sum(note["tokens"] for n in (0, 1, 2) for note in _notes(shared, n)) == 3 * 256 * 2  # two experts a token
    assert {note["tokens"] for n in range(4) for note in _notes(everyone, n)} == {256}
    ours, theirs = _weights(shared.path), _weights(everyone.path)
    name = f"model.layers.0.mlp.experts.{STARVED}.down_proj"
    assert torch.equal(ours[name], theirs[name])  # both have seen the same
    other = "model.layers.0.mlp.experts.0.down_proj"
    assert not torch.equal(ours[other], theirs[other])


def test_a_starved_expert_is_rounded_to_nearest(source: Path, text: Path, tmp_path: Path) -> None:
    nearest = _apply(source, text, tmp_path / "nearest", starved="nearest")
    plain = _apply(source, text, tmp_path / "rtn", {"quantize": {**W4["quantize"], "method": "rtn"}})
    assert any("rounded to nearest" in warning for warning in nearest.warnings)
    ours, theirs = _weights(nearest.path), _weights(plain.path)
    own = [name for name in ours if f".experts.{STARVED}." in name]
    assert len(own) == 6
    assert all(torch.equal(ours[name], theirs[name]) for name in own)
    assert not torch.equal(ours["model.layers.0.mlp.experts.0.up_proj"], theirs["model.layers.0.mlp.experts.0.up_proj"])


def test_a_starved_expert_ends_the_run_if_the_recipe_says_so(source: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(CompressError, match=r"layers\.0\.mlp\.experts: expert 3 .* 0 tokens .* 32"):
        _apply(source, text, tmp_path / "out", starved="fail")
    assert _apply(source, text, tmp_path / "none", starved="fail", at_least=0, tokens="all").path.is_dir()


def test_experts_are_written_under_the_names_of_their_family(text: Path, tmp_path: Path) -> None:
    family = next(f for f in FAMILIES if f.name == "mixtral")
    path = family.write(tmp_path / "model")
    names = set(Checkpoint(_apply(path, text, tmp_path / "out").path).names())
    home = "model.layers.1.block_sparse_moe"
    assert {f"{home}.experts.2.{leaf}.weight_packed" for leaf in ("w1", "w2", "w3")} <= names
    assert f"{home}.gate.weight" in names


def test_experts_that_are_not_compressed_are_copied_as_they_are(source: Path, text: Path, tmp_path: Path) -> None:
    stage = {"quantize": {**W4["quantize"], "ignore": ["lm_head", "*.experts.*"]}}
    artifact = _apply(source, text, tmp_path / "out", stage)
    before, after = Checkpoint(source), Checkpoint(artifact.path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(before.get(name), after.get(name))
    own = artifact.manifest["tensors"]["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert (own["action"], own["stored_as"], own["source_name"]) == ("copied", [name], name)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "jamba"])
def test_apart_they_compute_what_they_do_in_one(name: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = next(f for f in FAMILIES if f.name == name).config()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    (home, layout) = next(iter(find_fused(model).items()))
    fused = model.get_submodule(home)
    for parameter in fused.parameters():
        parameter.data.normal_(0, 0.3)
    rows = torch.randn(11, layout.hidden)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    weights = torch.rand(11, 2)
    held = {n: p.data.clone() for n, p in fused.named_parameters()}
    with torch.no_grad():
        expected = fused(rows, index, weights)
        assert unfuse(model, {home}) == [home]
        experts = model.get_submodule(home)
        assert isinstance(experts, Experts)
        for number in range(layout.count):
            for projection in layout.projections:
                for bias in (False, True) if layout.bias else (False,):
                    place = experts[number].get_submodule(projection)
                    value = layout.part(projection, held[layout.home(projection, bias)][number], bias)
                    (place.bias if bias else place.weight).data = value
        torch.testing.assert_close(experts(rows, index, weights), expected, rtol=1e-5, atol=1e-5)
        experts.everyone = {0, 2}  # who reads everything changes nothing of what comes out
        torch.testing.assert_close(experts(rows, index, weights), expected, rtol=1e-5, atol=1e-5)


def test_padding_is_no_token_of_an_expert() -> None:
    import transformers

    config = next(f for f in FAMILIES if f.name == "mixtral").config()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    unfuse(model)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    block = model.get_submodule("model.layers.0.mlp")
    experts = block.get_submodule("experts")
    rows = torch.randn(6, 64)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    index = torch.tensor([[0, 1], [0, 2], [0, 1], [2, 1], [3, 0], [0, 3]])
    groups = [InputGroup([f"experts.{n}.up_proj"], 64) for n in range(4)]
    found = collect(block, groups, [(lambda: experts(rows, index, torch.ones(6, 2)), mask)], stop_early=False)
    assert [s.tokens for s in found] == [3, 3, 1, 1]
    kept = rows[torch.tensor([0, 2, 4])]
    torch.testing.assert_close(found[0].hessian, kept.T @ kept / 3)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_experts_are_put_together_as_they_were(gate: bool, interleaved: bool, transposed: bool) -> None:
    layout = Layout(3, 5, 4, gate, interleaved, transposed, True, torch.float32)
    for bias in (False, True):
        for home in {layout.home(p, bias) for p in layout.projections}:
            own = [p for p in layout.projections if layout.home(p, bias) == home]
            held = torch.randn(layout.shape(own[0], bias))
            again = [layout.join(own[0], [layout.part(p, item, bias) for p in own], bias) for item in held]
            assert torch.equal(torch.stack(again), held)


def test_a_draft_is_cut_out_of_a_mixture(tmp_path: Path) -> None:
    """The experts of an artifact are one by one, those of a draft in one again; its layer computes what the artifact's does."""
    family = next(family for family in FAMILIES if family.name == "mixtral")
    path = family.write(tmp_path / "model")
    stages = [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}]
    artifact = compress.apply({"name": "t", "model": str(path), "stages": stages}, output=tmp_path / "out", quiet=True)
    draft = cut_checkpoint(artifact.path, None)
    ids = torch.tensor([[3, 17, 80, 101, 5, 64]])
    with torch.inference_mode():
        logits = draft(input_ids=ids).logits
    torch.testing.assert_close(logits, runtime.load(artifact.path).logits(ids), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
def test_an_artifact_decodes_in_c_and_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native engine has the experts of a mixture, in memory or streamed, and gives what transformers' modules give."""
    from runtime.engines import choose
    from runtime.engines.native.engine import NativeEngine
    from runtime.engines.streaming import engine as streaming
    from runtime.engines.streaming.engine import StreamedNative
    from runtime.engines.streaming.plan import plan
    from runtime.system.directories import cache_directory

    family = next(family for family in FAMILIES if family.name == "mixtral")
    path = replace(family, settings={**family.settings, "num_hidden_layers": 4}).write(tmp_path / "model")
    stages = [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}]
    artifact = compress.apply({"name": "t", "model": str(path), "stages": stages}, output=tmp_path / "out", quiet=True)
    whole, ids = runtime.load(artifact.path), torch.tensor([[3, 17, 80, 101, 5, 64]])
    assert type(whole.engine) is NativeEngine
    modules = Blueprint(Artifact(artifact.path), torch.device("cpu"), "auto", None, False).build()
    torch.testing.assert_close(whole.logits(ids), modules.logits(ids), rtol=1e-4, atol=1e-4)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "native").symlink_to(cache_directory("native"), target_is_directory=True)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choose, "SMALLEST", 0)
    monkeypatch.setattr(
        streaming, "plan", lambda _, outside, blocks, reserve: plan(outside + 2 * max(blocks), outside, blocks, 0)
    )
    streamed = runtime.load(artifact.path, max_memory="1GB")
    try:
        assert type(streamed.engine) is StreamedNative
        for _ in range(2):
            assert torch.equal(streamed.logits(ids), whole.logits(ids))
        prompts = [[5, 6, 7], [9]]
        assert streamed.generate(prompts, max_new_tokens=8) == whole.generate(prompts, max_new_tokens=8)
    finally:
        streamed.engine.close()


@pytest.mark.parametrize("target", ["huggingface", "onnx"])
def test_exports_say_that_they_do_not_carry_experts(tmp_path: Path, target: str) -> None:
    from export import targets
    from export.source import Source

    path = next(family for family in FAMILIES if family.name == "mixtral").write(tmp_path / "model")
    stages = [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}]
    artifact = compress.apply({"name": "t", "model": str(path), "stages": stages}, output=tmp_path / "out", quiet=True)
    chosen = targets.get(target)
    assert "experts.0.gate_proj is a routed expert's" in (chosen.why_not(Source(artifact.path), chosen.options()) or "")
