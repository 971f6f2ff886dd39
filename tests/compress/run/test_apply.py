"""Whole runs on tiny models: every tensor accounted for, the artifact computes what the pipeline computed, bytes repeat."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from random_models import UNLIMITED
from runs import TIMED
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import compress
import runtime
from compress.run.run import LimitError
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError, RequestError

GPTQ = {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}}
STAGES = {
    "rtn": [{"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}],
    "rtn ragged": [{"quantize": {"method": "rtn", "bits": 5, "group_size": 40}}],
    "rtn asymmetric 3 bits": [{"quantize": {"method": "rtn", "bits": 3, "group_size": 16, "symmetric": False}}],
    "gptq": [GPTQ],
    "gptq 8 channel": [{"quantize": {"method": "gptq", "scheme": "W8A16"}}],
    "awq": [{"quantize": {"method": "awq", "scheme": "W4A16", "group_size": 32}}],
    "smoothquant": [{"quantize": {"method": "smoothquant", "scheme": "W8A8-INT8"}}],
    "smoothquant static": [{"quantize": {"method": "smoothquant", "scheme": "W8A8-INT8", "activation_mode": "static"}}],
    "LLM.int8": [{"quantize": {"method": "gptq", "scheme": "LLM.int8"}}],
    "fp8": [{"quantize": {"method": "rtn", "scheme": "FP8_DYNAMIC"}}],
    "fp8 static": [{"quantize": {"method": "rtn", "scheme": "FP8"}}],
    "magnitude": [{"prune": {"method": "magnitude", "sparsity": 0.5}}],
    "wanda": [{"prune": {"method": "wanda", "sparsity": 0.5}}],
    "wanda 4:8": [{"prune": {"method": "wanda", "pattern": "4:8"}}],
    "sparsegpt": [{"prune": {"method": "sparsegpt", "sparsity": 0.6}}],
    "sparsegpt 2:4": [{"prune": {"method": "sparsegpt", "pattern": "2:4"}}],
    "joint 2:4": [{"prune": {"method": "sparsegpt", "pattern": "2:4"}}, GPTQ],
    "joint unstructured": [{"prune": {"method": "sparsegpt", "sparsity": 0.5}}, GPTQ],
    "wanda and gptq": [{"prune": {"method": "wanda", "pattern": "2:4"}}, GPTQ],
    "block": [{"prune": {"method": "magnitude", "pattern": "block:4x4", "sparsity": 0.5}}],
    "owl": [{"prune": {"method": "wanda", "sparsity": 0.5, "allocation": "owl"}}],
    "mixed": [GPTQ, {"quantize": {"method": "rtn", "scheme": "W8A16", "targets": ["*.down_proj"]}}],
}


def run(recipe, model, stages, output, **sections):
    return compress.apply(recipe(model, *stages, **sections), output=output, quiet=True)


@pytest.mark.sampled(2, 10)
@pytest.mark.parametrize("name", STAGES)
@torch.no_grad()
def test_artifact_is_what_the_pipeline_computed(make_checkpoint, recipe, tmp_path, name):
    model = make_checkpoint()
    artifact = run(recipe, model, STAGES[name], tmp_path / "out")
    manifest = artifact.manifest
    source = Checkpoint(model)
    assert set(manifest["tensors"]) == set(source.names())
    compressed = [n for n, entry in manifest["tensors"].items() if entry["action"] == "compressed"]
    assert len(compressed) == 3 * 7
    on_disk = {f.name for f in (tmp_path / "out").iterdir()}
    assert set(manifest["files"]) | {"compress.json", "README.md", *TIMED} == on_disk
    assert manifest["bytes"]["after"] < manifest["bytes"]["before"]
    ids = torch.randint(0, 257, (2, 20))
    ours = runtime.load(tmp_path / "out", kernels="reference").logits(ids)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)(ids).logits.float()
    # Activation codes that fall on the other side of a half spread through a random network; weights do less: the kernels in
    # transformers multiply codes and scales as they are, the reference rounds the product to bfloat16.
    quantized_inputs = any(
        "int8 channel a8" in layer["method"] or "fp8" in layer["method"] for layer in manifest["layers"]
    )
    assert float((ours - theirs).norm() / theirs.norm()) < (0.1 if quantized_inputs else 0.03)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)(ids).logits.float()
    assert not torch.equal(ours, dense), "nothing was compressed"


def test_two_runs_give_the_same_bytes(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint()
    evaluate = {**UNLIMITED, "data": recipe(model)["calibration"]["data"], "sequence_length": 32, "samples": 4}
    for name in ("a", "b"):
        run(recipe, model, STAGES["joint 2:4"], tmp_path / name, evaluate=evaluate)
    files = sorted(f.name for f in (tmp_path / "a").iterdir() if f.name not in TIMED)
    assert files == sorted(f.name for f in (tmp_path / "b").iterdir() if f.name not in TIMED)
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_sharded_source_gives_the_same_weights(make_checkpoint, recipe, tmp_path):
    whole = make_checkpoint(name="whole")
    shards = make_checkpoint(name="shards", shards="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 3
    run(recipe, whole, [GPTQ], tmp_path / "a")
    run(recipe, shards, [GPTQ], tmp_path / "b")
    for file in sorted((tmp_path / "a").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_padded_tokens_do_not_count(make_checkpoint, recipe, tmp_path):
    """Rows with padding give the statistics of their tokens: text after the end of a row changes nothing."""
    model = make_checkpoint()
    lines = ["a short line\n", "a somewhat longer line of text\n", "x\n", "four words are here\n"] * 2
    base = {"samples": 8, "sequence_length": 64, "batch_size": 2, "packing": False}
    for name, size in (("a", 2), ("b", 1)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        run(recipe, model, [GPTQ], tmp_path / name, calibration={**base, "data": str(file), "batch_size": size})
    first = json.loads((tmp_path / "a/compress.json").read_text())["layers"]
    second = json.loads((tmp_path / "b/compress.json").read_text())["layers"]
    for one, other in zip(first, second, strict=True):
        assert one["error"] == pytest.approx(other["error"], rel=0.05)


@torch.no_grad()
def test_head_and_embeddings_on_request(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint(tie_word_embeddings=True)
    stages = [
        {"quantize": {"method": "gptq", "scheme": "W8A16"}},
        {"quantize": {"method": "gptq", "scheme": "W8A16", "targets": ["lm_head"], "ignore": []}},
        {"quantize": {"method": "rtn", "scheme": "W8A16", "targets": ["Embedding"], "ignore": []}},
    ]
    artifact = run(recipe, model, stages, tmp_path / "out")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= {
        n for n, entry in artifact.manifest["tensors"].items() if entry["action"] == "compressed"
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    ids = torch.randint(0, 257, (1, 20), generator=torch.Generator().manual_seed(0))
    ours = runtime.load(tmp_path / "out", kernels="reference").logits(ids)
    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)(ids).logits.float()
    assert torch.nn.functional.cosine_similarity(ours.flatten(), dense.flatten(), dim=0) > 0.99
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)(ids).logits.float()
    assert float((ours - theirs).norm() / theirs.norm()) < 0.03  # bfloat16: 0.018 to 0.024, as the ids are


def test_limits_fail_the_run_and_keep_the_artifact(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint()
    text = recipe(model)["calibration"]["data"]
    evaluate = {**UNLIMITED, "data": text, "sequence_length": 32, "samples": 4, "min_agreement": 1.0}
    with pytest.raises(LimitError, match=r"min_agreement .*\b1;") as caught:
        run(
            recipe,
            model,
            [{"quantize": {"method": "rtn", "bits": 2, "group_size": 32}}],
            tmp_path / "out",
            evaluate=evaluate,
        )
    assert caught.value.exit_code == 1
    assert runtime.load(tmp_path / "out").logits(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 257)


@pytest.mark.parametrize("where", ["weight", "norm"])
def test_nan_names_the_layer(make_checkpoint, recipe, tmp_path, where):
    from safetensors.torch import save_file

    model = make_checkpoint()
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight" if where == "weight" else "model.layers.1.input_layernorm.weight"
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    culprit = name.removesuffix(".weight")
    with pytest.raises(CompressError, match=f"{culprit}: .*NaN or Inf"):
        run(recipe, model, [GPTQ], tmp_path / "out")
    if where == "weight":
        stage = {"quantize": {**GPTQ["quantize"], "targets": ["model.layers.1.mlp.up_proj"]}}
        artifact = run(recipe, model, [{"quantize": {"method": "rtn", "bits": 4, "group_size": 32, "targets": ["*layers.0*"]}}, stage],
                       tmp_path / "skip", on_nonfinite="skip", seed=1)  # fmt: skip
        entry = artifact.manifest["tensors"][name]
        assert entry["action"] == "copied"
        assert "NaN" in entry["reason"]


def test_output_that_holds_something_else_is_left_alone(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint()
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(RequestError, match=r"precious\.txt"):
            compress.apply(recipe(model, GPTQ), output=output, quiet=True, overwrite=overwrite)
    assert [f.name for f in output.iterdir()] == ["precious.txt"]


def test_finished_artifact_is_not_replaced_unasked(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint()
    request = recipe(model, STAGES["rtn"][0])
    compress.apply(request, output=tmp_path / "out", quiet=True)
    away = model.rename(tmp_path / "away")
    with pytest.raises(RequestError, match="--overwrite"):  # before anything of the model is read
        compress.apply(request, output=tmp_path / "out", quiet=True)
    away.rename(model)
    with pytest.raises(RequestError, match="--overwrite"):
        compress.apply(request, output=tmp_path / "out", quiet=True)
    before = (tmp_path / "out/compress.json").read_bytes()
    again = compress.apply(request, output=tmp_path / "out", quiet=True, resume=True)
    assert again.manifest["bytes"]
    assert (tmp_path / "out/compress.json").read_bytes() == before
    compress.apply(recipe(model, STAGES["rtn ragged"][0]), output=tmp_path / "out", quiet=True, overwrite=True)
    assert (tmp_path / "out/compress.json").read_bytes() != before


def test_compressed_source_is_refused(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint()
    compress.apply(recipe(model, STAGES["rtn"][0]), output=tmp_path / "out", quiet=True)
    with pytest.raises(RequestError, match="quant_method"):
        compress.apply(recipe(tmp_path / "out", STAGES["rtn"][0]), output=tmp_path / "again", quiet=True)


@pytest.mark.slow
def test_plan_matches_what_apply_does(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint()
    for name in ("gptq", "joint 2:4", "smoothquant", "fp8 static", "rtn ragged", "sparsegpt 2:4"):
        plan = compress.plan(recipe(model, *STAGES[name]), output=tmp_path / name)
        assert not (tmp_path / name).exists(), "a plan writes nothing"
        artifact = run(recipe, model, STAGES[name], tmp_path / name)
        planned = {t.name: (t.action, t.bytes_before, t.bytes_after) for t in plan.tensors}
        done = {n: (e["action"], e["bytes_before"], e["bytes_after"]) for n, e in artifact.manifest["tensors"].items()}
        assert planned == done, name
        assert plan.bytes_after == artifact.manifest["bytes"]["after"]
        assert plan.seconds > 0


def test_a_run_that_cannot_fit_is_refused(make_checkpoint, recipe, tmp_path, monkeypatch):
    model = make_checkpoint()
    monkeypatch.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(RequestError, match="disk"):
        run(recipe, model, [GPTQ], tmp_path / "out")
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_full_disk_ends_cleanly_and_resumes(make_checkpoint, recipe, tmp_path, monkeypatch):
    from compress.weights import shard

    model = make_checkpoint()
    real, calls = shard.save_file, []

    def fails_at_third(tensors, path, metadata=None):
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half a file")
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(shard, "save_file", fails_at_third)
    with pytest.raises(CompressError, match=r"disk.*--resume") as caught:
        run(recipe, model, [GPTQ], tmp_path / "out")
    assert caught.value.exit_code == 1
    assert not list((tmp_path / "out").glob(".*.tmp")), "the half-written file is gone"
    monkeypatch.undo()
    compress.apply(recipe(model, GPTQ), output=tmp_path / "out", resume=True, quiet=True)
    run(recipe, model, [GPTQ], tmp_path / "straight")
    for file in sorted((tmp_path / "straight").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


@pytest.mark.parametrize("allocation", ["owl", "error"])
def test_allocation_meets_the_budget(make_checkpoint, recipe, tmp_path, allocation):
    stage = {"prune": {"method": "sparsegpt", "sparsity": 0.5, "allocation": allocation}}
    layers = run(recipe, make_checkpoint(), [stage], tmp_path / "out").manifest["layers"]
    sizes = [layer["shape"][0] * layer["shape"][1] for layer in layers]
    mean = sum(size * layer["sparsity"] for size, layer in zip(sizes, layers, strict=True)) / sum(sizes)
    assert mean == pytest.approx(0.5, abs=0.01)
    assert len({round(layer["sparsity"], 2) for layer in layers}) > 1, "every layer got the same"
    said = [float(layer["method"].split()[1].removesuffix("%")) for layer in layers]
    assert said == pytest.approx([100 * layer["sparsity"] for layer in layers], abs=1), "each layer's is its own"


def test_what_did_not_change_is_copied_bit_for_bit(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint(dtype=torch.float32)
    for name, stage in (("plain", GPTQ), ("scaled", STAGES["awq"][0])):
        artifact = run(recipe, model, [stage], tmp_path / name)
        source, result = Checkpoint(model), Checkpoint(tmp_path / name)
        for tensor, entry in artifact.manifest["tensors"].items():
            if entry["action"] == "copied" and "reason" not in entry:
                assert torch.equal(source.get(tensor), result.get(tensor))
        touched = [t for t, entry in artifact.manifest["tensors"].items() if "reason" in entry]
        assert len(touched) == (0 if name == "plain" else 6), "norms take scales only when there are scales"


def test_checkpoint_stored_wider_than_its_config_says(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint(dtype=torch.float32)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    run(recipe, model, [GPTQ], tmp_path / "out")
    assert runtime.load(tmp_path / "out").logits(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smoothquant", "fp8 static", "joint 2:4", "awq"])
def test_evaluation_compares_with_the_untouched_source(make_checkpoint, recipe, tmp_path, name):
    """What stood in for the layers while compressing is gone when the source is measured."""
    model = make_checkpoint()
    evaluate = {**UNLIMITED, "data": recipe(model)["calibration"]["data"], "sequence_length": 32, "samples": 4}
    metrics = run(recipe, model, STAGES[name], tmp_path / "out", evaluate=evaluate).metrics
    same = run(recipe, model, STAGES["rtn"], tmp_path / "rtn", evaluate=evaluate).metrics
    assert metrics["before"] == same["before"]
    assert metrics["after"] != metrics["before"]
    assert metrics["kl"] > 0


@pytest.mark.slow
def test_overwrite_touches_only_its_own_directory(make_checkpoint, recipe, tmp_path):
    model, output, victim = make_checkpoint(), tmp_path / "out", tmp_path / "victim.txt"
    victim.write_text("mine")
    compress.apply(recipe(model, STAGES["rtn"][0]), output=output, quiet=True)
    manifest = json.loads((output / "compress.json").read_text())
    (output / "compress.json").write_text(json.dumps({**manifest, "files": {**manifest["files"], "../victim.txt": {}}}))
    compress.apply(recipe(model, GPTQ), output=output, quiet=True, overwrite=True)
    assert victim.read_text() == "mine"


def test_a_refused_overwrite_leaves_the_old_artifact(make_checkpoint, recipe, tmp_path, monkeypatch):
    from compress.run import plan

    model, output = make_checkpoint(), tmp_path / "out"
    compress.apply(recipe(model, STAGES["rtn"][0]), output=output, quiet=True)
    before = {f.name: f.read_bytes() for f in output.iterdir()}
    monkeypatch.setattr(plan, "MEMORY_SHARE", 0.0)
    with pytest.raises(RequestError, match="memory"):
        compress.apply(recipe(model, GPTQ), output=output, quiet=True, overwrite=True)
    assert {f.name: f.read_bytes() for f in output.iterdir()} == before
    with pytest.raises(RequestError, match="memory"):
        compress.apply(recipe(model, GPTQ), output=tmp_path / "fresh", quiet=True)
    assert not (tmp_path / "fresh").exists()


def test_resume_of_a_finished_artifact_still_judges_and_verifies(make_checkpoint, recipe, tmp_path):
    model, output = make_checkpoint(), tmp_path / "out"
    evaluate = {"data": recipe(model)["calibration"]["data"], "sequence_length": 32, "samples": 4, "max_kl": 1e-9}
    request = recipe(model, STAGES["rtn"][0], evaluate=evaluate)
    for resume in (False, True):
        with pytest.raises(LimitError, match="max_kl"):
            compress.apply(request, output=output, quiet=True, resume=resume)
    shard = sorted(output.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RequestError, match=shard.name):
        compress.apply(request, output=output, quiet=True, resume=True)
    with pytest.raises(RequestError, match="SHA-256"):
        runtime.load(output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_on_part_of_a_shared_input(make_checkpoint, recipe, tmp_path, dtype):
    """q_proj is scaled and quantized; k and v read the same input, take the scale too, and stay dense."""
    stage = {"quantize": {"method": "awq", "bits": 4, "group_size": 32, "targets": ["q_proj"]}}
    artifact = run(recipe, make_checkpoint(dtype=dtype), [stage], tmp_path / "out")
    touched = {n.split(".", 3)[3] for n, entry in artifact.manifest["tensors"].items() if "reason" in entry}
    assert touched == {"input_layernorm.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}


def test_an_unfinished_run_does_not_load(make_checkpoint, recipe, tmp_path):
    output = tmp_path / "out"
    compress.apply(recipe(make_checkpoint(), STAGES["rtn"][0]), output=output, quiet=True)
    (output / "compress.json").unlink()
    (output / ".compress").mkdir()
    (output / ".compress/run.json").write_text("{}")
    with pytest.raises(RequestError, match="--resume"):
        runtime.load(output)


def test_growing_is_said(make_checkpoint, recipe):
    stage = {"quantize": {"method": "rtn", "bits": 8, "group_size": 1}}
    assert any(
        "will not get smaller" in warning for warning in compress.plan(recipe(make_checkpoint(), stage)).warnings
    )
    head = {"quantize": {"method": "rtn", "scheme": "W8A16", "targets": ["lm_head"], "ignore": []}}
    plan = compress.plan(recipe(make_checkpoint(name="tied", tie_word_embeddings=True), head))
    assert any("share one tensor" in warning for warning in plan.warnings)


def test_a_layout_that_others_cannot_read_is_said(make_checkpoint, recipe):
    ragged = compress.plan(recipe(make_checkpoint(), STAGES["rtn ragged"][0]))
    assert any("not elsewhere" in warning for warning in ragged.warnings)
    plain = compress.plan(recipe(make_checkpoint(), {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}))
    assert not any("not elsewhere" in warning for warning in plain.warnings)


def test_the_advice_fits_what_takes_the_memory(make_checkpoint, recipe, monkeypatch):
    from compress.run import plan as footprint

    monkeypatch.setattr(footprint, "free_bytes", lambda: 1 << 20)
    monkeypatch.setattr(footprint, "memory_bytes", lambda: 1 << 20)
    small = compress.plan(recipe(make_checkpoint(), STAGES["rtn"][0]))
    assert any("largest block" in problem for problem in small.problems)
    asked = recipe(make_checkpoint(), GPTQ)
    asked["calibration"] |= {"batch_size": 256, "sequence_length": 64, "samples": 256}
    assert any("lower calibration.batch_size" in problem for problem in compress.plan(asked).problems)


def test_inf_in_the_activations_names_the_layer(make_checkpoint, recipe, tmp_path):
    """Weights that are finite, and a product that is not: float16 overflows at 65504."""
    from safetensors.torch import save_file

    model = make_checkpoint(dtype=torch.float16)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"].fill_(60000.0)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match=r"model\.layers\.1\.mlp\.\w+: .*NaN or Inf"):
        run(recipe, model, [GPTQ], tmp_path / "out")
