"""Budgets of bits, size and KL: what is chosen, that it is met, that engines can fuse it, and that it is better than equal bits for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_models import bert, byte_tokenizer, t5
from runs import same_bytes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import compress
import runtime
from compress.recipe import load
from compress.weights import allocate, block_pass
from runtime.errors import CompressError, RequestError

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def stage(method: str = "gptq", **fields: Any) -> dict[str, Any]:
    return {"quantize": {"method": method, "group_size": 32, **fields}}


def stored_bits(manifest: dict[str, Any]) -> float:
    """Bits per weight of the layers that the budget is for, as their bytes in the file say."""
    budget = manifest["budget"]
    names = {name for unit in budget["units"] for name in unit["layers"]}
    assert len(names) == sum(len(unit["layers"]) for unit in budget["units"])
    layers = [layer for layer in manifest["layers"] if layer["name"] in names]
    return 8 * sum(x["bytes_after"] for x in layers) / sum(x["shape"][0] * x["shape"][1] for x in layers)


def schemes(manifest: dict[str, Any]) -> dict[str, str]:
    return {layer["name"]: layer["method"] for layer in manifest["layers"]}


OWL = {"prune": {"method": "sparsegpt", "sparsity": 0.3, "allocation": "owl"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("bits", "more"), [(3.5, []), (3.0, []), (3.5, [OWL]), (4.5, []), (6.25, [])])
def test_bits_are_met_from_below(make_checkpoint: Any, recipe: Any, tmp_path: Path, bits: float, more: Any) -> None:
    source = make_checkpoint(num_hidden_layers=4)
    found = compress.apply(recipe(source, *more, stage(bits=bits)), output=tmp_path / "out", quiet=True).manifest
    assert bits - 0.02 <= found["budget"]["bits"] <= bits
    assert stored_bits(found) == pytest.approx(found["budget"]["bits"], abs=0.02 if more else 1e-9)
    made = schemes(found)
    assert len(set(made.values())) > 1
    for name in (name for name in made if name.endswith(("q_proj", "gate_proj"))):
        home, _, leaf = name.rpartition(".")
        shards = next(shards for shards in FUSED if leaf in shards)
        assert len({made[f"{home}.{shard}"].split(" + ")[-1] for shard in shards}) == 1


@pytest.mark.parametrize("pruned", [["*.q_proj", "*.gate_proj"], ["*.k_proj", "*.up_proj"]], ids=["first", "second"])
def test_part_of_a_unit_may_be_pruned(make_checkpoint: Any, recipe: Any, tmp_path: Path, pruned: list[str]) -> None:
    prune = {"prune": {"method": "sparsegpt", "pattern": "2:4", "targets": pruned}}
    request = recipe(make_checkpoint(), prune, stage(bits=4.0, candidates=[3, 4, 6]))
    found = compress.apply(request, output=tmp_path / "out", quiet=True).manifest
    assert stored_bits(found) == pytest.approx(found["budget"]["bits"])
    assert found["budget"]["bits"] <= 4.0


def test_nothing_that_can_be_measured_is_said(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint()
    file = next(source.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    request = recipe(source, stage(bits=3.5)) | {"on_nonfinite": "skip"}
    with pytest.raises(CompressError, match=r"NaN or Inf|NaN or infinite"):
        compress.apply(request, output=tmp_path / "out", quiet=True)


def test_what_matters_more_gets_more(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    """A block that adds next to nothing to the hidden states has its layers in fewer bits than the others have."""
    source = make_checkpoint(num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for module in (model.model.layers[1].self_attn.o_proj, model.model.layers[1].mlp.down_proj):
            module.weight.mul_(1e-3)
    model.save_pretrained(source)
    budget = compress.apply(recipe(source, stage(bits=4.0)), output=tmp_path / "out", quiet=True).manifest["budget"]
    quiet = [unit for unit in budget["units"] if ".layers.1." in unit["layers"][0]]
    loud = [unit for unit in budget["units"] if ".layers.1." not in unit["layers"][0]]
    assert {unit["scheme"] for unit in quiet} == {"int2 g32"}
    assert min(unit["bits"] for unit in loud) > 2.6
    assert max(unit["kl"] for unit in quiet) < min(unit["kl"] for unit in loud)


def test_the_artifact_loads_is_exported_and_says_what_was_chosen(
    make_checkpoint: Any, recipe: Any, tmp_path: Path
) -> None:
    import export

    source = make_checkpoint()
    evaluate = {"data": recipe(source)["calibration"]["data"], "sequence_length": 32, "samples": 4}
    evaluate |= {"max_kl": "none", "min_agreement": "none"}
    request = recipe(source, stage(bits=5.0, candidates=[4, 8]), evaluate=evaluate)
    request["calibration"] |= {"samples": 16}
    artifact = compress.apply(request, output=tmp_path / "out", quiet=True)
    logits = runtime.load(artifact.path).logits(torch.zeros(1, 4, dtype=torch.long))
    assert logits.isfinite().all()
    read = {one["name"]: one["how"] for one in artifact.manifest["readable_by"]}
    assert (read["transformers"], read["vLLM"]) == ("yes", "yes"), "4 and 8 bits are what vLLM has kernels for"
    export.export(artifact.path, "huggingface", output=tmp_path / "exported")
    again = runtime.load(tmp_path / "exported").logits(torch.zeros(1, 4, dtype=torch.long))
    assert torch.allclose(again, logits)
    budget, page = artifact.manifest["budget"], (artifact.path / "report.html").read_text()
    assert "<h2>Budget</h2>" in page
    assert f"predicted KL divergence {budget['kl']:.4g} nats per token, {artifact.metrics['kl']:.4g} on" in page
    assert all(unit["layers"][0] in page for unit in budget["units"])
    assert sum(unit["kl"] for unit in budget["units"]) == pytest.approx(budget["kl"])


def test_the_plan_shows_the_choice_that_the_run_makes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from compress.cli import main

    request = recipe(make_checkpoint(), stage(bits=3.5))
    before, after = (compress.plan(request, output=tmp_path / "out", allocate=now) for now in (False, True))
    layers = [tensor for tensor in before.tensors if tensor.action == "compressed"]
    weights = sum(tensor.bytes_before // 2 for tensor in layers)
    assert 8 * sum(tensor.bytes_after for tensor in layers) / weights == pytest.approx(3.5, abs=0.02)
    assert before.stages["budget"]["layers"] == len(layers)
    assert "units" not in before.stages["budget"]
    assert before.memory["allocation"] > 0
    assert "allocation" not in after.memory
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    assert after.stages["budget"] == made.manifest["budget"]
    assert after.bytes_after == made.manifest["bytes"]["after"]
    chosen = {tensor.name: tensor.method for tensor in after.tensors if tensor.action == "compressed"}
    assert chosen == {f"{name}.weight": method for name, method in schemes(made.manifest).items()}
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps({**request, "output": str(tmp_path / "new")}))
    for options, words in (([], "--allocate does it now"), (["--allocate"], "predicted KL")):
        assert main(["plan", str(file), *options]) == 0
        assert words in capsys.readouterr().out


def test_size_counts_the_whole_artifact(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint(num_hidden_layers=4)
    head = {"quantize": {"method": "rtn", "bits": 8, "group_size": 32, "targets": ["lm_head"]}}
    whole = compress.plan(recipe(source, stage(bits=4.0), head)).bytes_after
    planned = compress.plan(recipe(source, stage(size=whole), head))
    assert planned.bytes_after == pytest.approx(whole, rel=0.001)
    found = compress.apply(recipe(source, stage(size=whole), head), output=tmp_path / "out", quiet=True).manifest
    assert 0.99 * whole < found["bytes"]["after"] <= whole
    assert found["budget"]["key"] == "size"


def test_max_kl_takes_the_least_that_is_predicted_to_suffice(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source, found = make_checkpoint(), {}
    for most in (0.5, 0.05):
        out = compress.apply(recipe(source, stage(max_kl=most)), output=tmp_path / str(most), quiet=True)
        found[most] = out.manifest["budget"]
        assert 0.5 * most < found[most]["kl"] <= most
    assert found[0.5]["bits"] < found[0.05]["bits"]
    with pytest.raises(
        CompressError,
        match=r"stages\.0\.quantize\.max_kl: 1e-09 cannot be met: .* is predicted with the largest candidate everywhere",
    ):
        compress.apply(recipe(source, stage(max_kl=1e-9)), output=tmp_path / "no", quiet=True)


def test_experts_of_a_layer_get_one_scheme(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint("mixtral")
    found = compress.apply(recipe(source, stage(bits=3.5)), output=tmp_path / "out", quiet=True).manifest
    homes: dict[str, set[str]] = {}
    for name, how in schemes(found).items():
        if ".experts." in name:
            homes.setdefault(name.partition(".experts.")[0], set()).add(how)
    assert homes
    assert all(len(own) == 1 for own in homes.values())
    assert found["budget"]["bits"] <= 3.5
    assert runtime.load(tmp_path / "out").logits(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


@pytest.mark.parametrize("kind", ["encoder", "encoder-decoder"])
def test_models_with_an_encoder(recipe: Any, tmp_path: Path, kind: str) -> None:
    """An encoder, which predicts no tokens, is measured by its outputs."""
    source = tmp_path / "model"
    (bert() if kind == "encoder" else t5()).save_pretrained(source)
    byte_tokenizer(kind == "encoder").save_pretrained(source)
    found = compress.apply(recipe(source, stage("rtn", bits=4.0)), output=tmp_path / "out", quiet=True).manifest
    assert 3.9 <= found["budget"]["bits"] <= 4.0
    if kind == "encoder-decoder":
        return
    with pytest.raises(RequestError, match="an encoder predicts no tokens"):
        compress.plan(recipe(source, stage("rtn", max_kl=0.1)))


@pytest.mark.parametrize(
    ("bits", "candidates"),
    [
        (4.2, ["W4A16", "NVFP4A16", "MXFP8A16", 3]),
        (4.2, [{"bits": 2, "group_size": 16}, 2, 3, 4]),
        (4.8, ["W2A16_CODEBOOK", "W3A16_CODEBOOK", "W4A16_CODEBOOK", 4]),
    ],
)
def test_candidates_of_several_representations(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, bits: float, candidates: list[Any]
) -> None:
    request = recipe(make_checkpoint(), stage(bits=bits, candidates=candidates))
    found = compress.apply(request, output=tmp_path / "out", quiet=True).manifest
    assert found["budget"]["bits"] <= bits
    assert len(set(schemes(found).values())) > 1
    assert stored_bits(found) == pytest.approx(found["budget"]["bits"])


def test_recovery_trains_on_what_was_chosen(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    recover = {
        "method": "finetune",
        "samples": 8,
        "sequence_length": 16,
        "steps": 2,
        "batch_size": 2,
        "evaluate_every": 1,
    }
    request = recipe(make_checkpoint(), stage("rtn", bits=4.0), {"recover": recover})
    trained = compress.apply(request, output=tmp_path / "out", quiet=True)
    plain = compress.apply(recipe(make_checkpoint(), stage("rtn", bits=4.0)), output=tmp_path / "plain", quiet=True)
    assert schemes(trained.manifest) == schemes(plain.manifest)
    assert trained.manifest["budget"] == plain.manifest["budget"]
    assert "predicted KL divergence" in (tmp_path / "out" / "report.html").read_text()
    assert len(set(schemes(plain.manifest).values())) > 1


def test_candidates_are_measured_without_what_quality_best_sets(
    make_checkpoint: Any, recipe: Any, tmp_path: Path
) -> None:
    source, found = make_checkpoint(), {}
    for quality in ("fast", "best"):
        request = recipe(source, stage(bits=3.5, quality=quality))
        found[quality] = compress.apply(request, output=tmp_path / quality, quiet=True).manifest
    assert found["best"]["budget"] == found["fast"]["budget"]
    assert all(method.endswith(" output") for method in schemes(found["best"]).values())
    assert not any(method.endswith(" output") for method in schemes(found["fast"]).values())


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("where", ["before the choice", "after it"])
@pytest.mark.parametrize("spill", [False, True])
def test_an_interrupted_run_ends_with_the_same_bytes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spill: bool, where: str
) -> None:
    if spill:
        from compress.run import plan

        monkeypatch.setattr(plan, "SPILL_SHARE", -1.0)
    request = recipe(make_checkpoint(), stage(bits=3.5, objective="propagated"))
    compress.apply(request, output=tmp_path / "straight", quiet=True)
    module, name = (allocate, "_chosen") if where == "before the choice" else (block_pass, "run_block")
    real = getattr(module, name)

    def fail(job: Any, *arguments: Any) -> Any:
        if where == "before the choice" or arguments[0] == 1:
            raise CompressError("stopped")
        return real(job, *arguments)

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(CompressError, match="stopped"):
        compress.apply(request, output=tmp_path / "resumed", quiet=True)
    monkeypatch.setattr(module, name, real)
    if where == "after it":
        monkeypatch.setattr(allocate, "measure", lambda *_: pytest.fail("measured again"))
    compress.apply(request, output=tmp_path / "resumed", quiet=True, resume=True)
    same_bytes(tmp_path / "straight", tmp_path / "resumed")


REFUSED = {
    "two budgets": ([stage(bits=3.5, max_kl=0.1)], r"bits: bits and max_kl exclude each other: a stage has one of"),
    "bits and size": ([stage(bits=4, size="1MB")], r"bits: bits and size exclude each other"),
    "too many": ([stage(bits=8.5)], r"stages\.0\.quantize\.bits: "),
    "too few": ([stage(bits=1.5)], r"stages\.0\.quantize\.bits: "),
    "no size": ([stage(size="much")], r"size must be a number of bytes or a text"),
    "candidates without a budget": ([stage(bits=4, candidates=[2, 3])], r"candidates need a budget in the same stage"),
    "one candidate": ([stage(bits=3.5, candidates=[4])], r"candidates: "),
    "a candidate twice": ([stage(bits=3.5, candidates=[3, 4, {"bits": 4}])], r"candidates: int4 g\d+ is there twice"),
    "a candidate of half a bit": ([stage(bits=3.5, candidates=[3, {"bits": 3.5}])], r"whole number, not 3\.5"),
    "an unknown candidate": ([stage(bits=3.5, candidates=[3, "W4A17"])], r"W4A17.*did you mean"),
    "an unknown field": ([stage(bits=3.5, candidates=[3, {"bit": 3}])], r"'bit' is no field of a candidate"),
    "candidates with activations": ([stage(bits=3.5, candidates=[3, "W4A8"])], r"all must quantize activations alike, or none"),
    "a fixed scheme": ([stage(bits=3.5, group_size=None, scheme="NVFP4A16")], r"'NVFP4A16' has a fixed bits"),
}  # fmt: skip
UNFIT = {
    "below the smallest": ([stage(bits=2.2)], r"bits 2\.2 is less than the 2\.5\d that all layers take with the smallest candidate"),
    "above the largest": ([stage(bits=4.0, candidates=[2, 3])], r"bits 4\.0 is more than the 3\.5\d that all layers take with the largest"),
    "a tiny size": ([stage(size="1kB")], r"size 1\.00 kB is less than the .* that all layers take with the smallest"),
    "two stages": ([stage(bits=3.5), stage(bits=4.5, targets=["down_proj"])], r"stages\.1\.quantize\.bits: stage 0 has a budget"),
    "a head": ([stage(bits=3.5, ignore=[])], r"lm_head is in no block, and a budget is for layers of blocks"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_budget_is_refused_with_a_sentence(case: str) -> None:
    stages, words = REFUSED[case]
    with pytest.raises(RequestError, match=words) as caught:
        load({"name": "t", "model": "m", "stages": stages})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", UNFIT)
def test_what_the_model_cannot_meet_is_refused(make_checkpoint: Any, recipe: Any, case: str) -> None:
    stages, words = UNFIT[case]
    with pytest.raises(RequestError, match=words) as caught:
        compress.plan(recipe(make_checkpoint(tie_word_embeddings=False), *stages))
    assert "\n" not in str(caught.value)


def test_nothing_to_allocate_is_said(make_checkpoint: Any, recipe: Any) -> None:
    with pytest.raises(RequestError, match="no quantize stage has a budget"):
        compress.plan(recipe(make_checkpoint(), stage(bits=4)), allocate=True)
    cut = {"structure": {"remove": "ffn", "method": "magnitude", "ratio": 0.5, "multiple": 8}}
    with pytest.raises(RequestError, match=r"stage 0 \(structure\) changes first"):
        compress.plan(recipe(make_checkpoint(), cut, stage(bits=3.5)), allocate=True)


@pytest.mark.slow
def test_kl_is_below_that_of_equal_bits(bundled: Path, tmp_path: Path) -> None:
    """At 3.5 bits as stored: 3 bits in groups of 32 for all, or a budget over groups of 128."""
    found = {}
    for name, fields in (
        ("equal", {"bits": 3, "group_size": 32}),
        ("budget", {"bits": 3.5, "candidates": [2, 3, 4, 5]}),
    ):
        request = {
            "name": "t",
            "model": str(bundled),
            "calibration": {"data": "bundled", "samples": 32, "sequence_length": 256, "seed": 1},
            "stages": [{"quantize": {"method": "gptq", "sweeps": 0, **fields}}],
            "evaluate": {"data": "bundled", "sequence_length": 256, "samples": 16},
        }
        found[name] = compress.apply(request, output=tmp_path / name, quiet=True)
    bits = stored_bits(found["budget"].manifest)
    assert 3.48 <= bits <= 3.5
    assert found["budget"].metrics["kl"] < 0.9 * found["equal"].metrics["kl"]
    predicted = found["budget"].manifest["budget"]["kl"]
    assert 0.5 < found["budget"].metrics["kl"] / predicted < 2
