"""Recipes with a kv_cache stage, from the file to what the artifact does with it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from random_models import UNLIMITED

import compress
import runtime
from compress.cli import main
from compress.recipe import load
from compress.run.run import LimitError
from runtime.checkpoint.artifact import Artifact
from runtime.errors import RequestError
from runtime.kv_cache.policy.policy import Policy

KV4 = {"kv_cache": {"keys": "int4", "values": "int4", "recent": 32}}
RTN = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}


def test_a_policy_goes_from_the_recipe_through_the_artifact_into_the_cache(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint("qwen3", head_dim=32, max_position_embeddings=1024)
    written = compress.apply(recipe(model, RTN, KV4), output=tmp_path / "out", quiet=True)
    assert Policy.parse(written.manifest["kv_cache"]) == Policy.parse(KV4["kv_cache"])
    assert Artifact(written.path).summary()["kv_cache"] == written.manifest["kv_cache"]
    assert load(written.path / "recipe.yaml").stages[-1].config == Policy.parse(KV4["kv_cache"])
    loaded = runtime.load(written.path, device="cpu")
    loaded.generate([1, 2, 3] * 320, max_new_tokens=4, ignore_eos=True)
    compressed = loaded.stats["cache_bytes"]
    assert loaded.stats["kv_cache"] == "keys int4, values int4"
    plain = runtime.load(written.path, device="cpu", kv_cache={})
    plain.generate([1, 2, 3] * 320, max_new_tokens=4, ignore_eos=True)
    assert compressed < 0.75 * plain.stats["cache_bytes"], "what 32 recent tokens and a step take stays as it is"
    page = (written.path / "report.html").read_text(encoding="utf-8")
    assert "KV cache" in page
    assert "keys int4, values int4" in page


def test_a_recipe_of_a_cache_alone_copies_the_weights(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint()
    written = compress.apply(recipe(model, {"kv_cache": "streamingllm"}), output=tmp_path / "out", quiet=True)
    assert {entry["action"] for entry in written.manifest["tensors"].values()} == {"copied"}
    assert "quantization_config" not in Artifact(written.path).config
    prompt = list(range(1, 60))
    expected = runtime.load(model, device="cpu", kv_cache={}).generate(prompt, max_new_tokens=6)
    assert runtime.load(written.path, device="cpu").generate(prompt, max_new_tokens=6) == expected, "below its budget"


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_what_a_policy_needs_is_calibrated_once_and_used(make_checkpoint, recipe, tmp_path, monkeypatch, device):
    from compress.kv_cache import calibrate as module

    asked = []
    own = module.calibrate

    def watched(path, needs, rows, *rest, **named):
        asked.append((sorted(needs.missing), tuple(rows.shape), named["device"]))
        return own(path, needs, rows, *rest, **named)

    monkeypatch.setattr(module, "calibrate", watched)
    stage = {"kv_cache": {"method": "doublesparsity", "keys": "int4"}}
    model = make_checkpoint(max_position_embeddings=1024)
    written = compress.apply(recipe(model, RTN, stage), output=tmp_path / "out", quiet=True, device=device)
    assert asked == [(["channels"], (8, 32), torch.device(device))]
    known = Policy.parse(written.manifest["kv_cache"]).calibrated
    assert known is not None
    assert len(known.values["channels"]) == 3
    assert known.notes["seconds"]
    assert written.seconds["calibrate cache"] >= 0
    assert written.manifest["calibration"]["rows"] == 8
    assert "calibrated" not in load(written.path / "recipe.yaml").stages[-1].resolved()["kv_cache"]
    model = runtime.load(written.path, device="cpu")
    assert model.generate([1, 2, 3] * 20, max_new_tokens=4, ignore_eos=True)


def test_gates_are_trained_for_the_policys_window_and_beside_what_it_knows(
    make_checkpoint, recipe, tmp_path, monkeypatch
):
    from compress.kv_cache import gates as module
    from runtime.kv_cache.policy.calibrated import fingerprint
    from runtime.modeling.skeleton import read_config

    monkeypatch.setattr(module, "GateOptions", partial(module.GateOptions, steps=2, length=32))
    model = make_checkpoint(max_position_embeddings=1024)
    channels = [[[1], [2]]] * 3
    stage = {
        "evict": {"score": "duo", "ratio": 1.0, "sinks": 2, "recent": 6}, "select": "double-sparsity",
        "calibrated": {"fingerprint": fingerprint(read_config(model)), "channels": channels, "seconds": {"channels": 1.0}},
    }  # fmt: skip
    written = compress.apply(recipe(model, {"kv_cache": stage}), output=tmp_path / "out", quiet=True, device="cpu")
    known = Policy.parse(written.manifest["kv_cache"]).calibrated
    assert known.notes["facts"]["gates"]["window"] == [2, 6]
    assert known.values["channels"] == (((1,), (2,)),) * 3, "not looked for again"
    assert len(known.values["gates"]) == 3
    assert set(known.notes["seconds"]) == {"channels", "gates"}
    runtime.load(written.path, device="cpu")


FEW = {
    "evict": {"score": "snapkv", "ratio": 0.1, "observe": 8}, "keys": "int2", "values": "int2", "recent": 8,
}  # fmt: skip
HELDOUT = {"data": "bundled", "sequence_length": 128, "samples": 8}


def test_a_limit_holds_for_weights_and_cache_together(bundled, recipe, tmp_path, capsys):
    limited = recipe(bundled, {"kv_cache": FEW}, evaluate={**HELDOUT, "max_perplexity_increase": "3%"})
    with pytest.raises(LimitError, match=r"max_perplexity_increase_overall.*0\.03") as failure:
        compress.apply(limited, output=tmp_path / "few", quiet=True, device="cpu")
    metrics = failure.value.result.metrics
    assert abs(metrics["perplexity_increase"]) < 0.001, "the weights are as they were"
    assert metrics["perplexity_increase_with_cache"] > 0.03
    both = (1 + metrics["perplexity_increase"]) * (1 + metrics["perplexity_increase_with_cache"]) - 1
    assert metrics["perplexity_increase_overall"] == pytest.approx(both)
    limits = {limit["name"]: limit["ok"] for limit in metrics["limits"]}
    assert limits == {
        "max_perplexity_increase": True, "max_perplexity_increase_overall": False, "max_kl_cache": False,
        "min_agreement_cache": True,
    }  # fmt: skip
    page = (tmp_path / "few" / "report.html").read_text(encoding="utf-8")
    assert "plain cache" in page
    assert "increase of the perplexity by weights and cache at most" in page
    file = tmp_path / "few.yaml"
    file.write_text(json.dumps(limited), encoding="utf-8")  # JSON is YAML
    capsys.readouterr()
    assert main(["apply", str(file), "-o", str(tmp_path / "again"), "-q", "--device", "cpu", "--prompt", ""]) == 1
    captured = capsys.readouterr()
    assert "max_perplexity_increase_overall" in captured.err
    assert "with a plain cache" in captured.out
    runtime.load(tmp_path / "again", device="cpu")


def test_a_limit_that_the_cache_keeps(bundled, recipe, tmp_path):
    mild = {"kv_cache": {"keys": "int8", "values": "int8", "recent": 8}}
    limits = {"max_perplexity": 50.0, "max_perplexity_increase": "3%"}
    written = compress.apply(recipe(bundled, mild, evaluate={**HELDOUT, **limits}), output=tmp_path / "out", quiet=True)
    assert [limit["name"] for limit in written.metrics["limits"]] == [
        "max_perplexity", "max_perplexity_increase", "max_kl_cache", "max_perplexity_increase_overall", "max_perplexity_overall",
        "min_agreement_cache",
    ]  # fmt: skip
    assert abs(written.metrics["perplexity_increase_with_cache"]) < 0.03
    assert written.manifest["metrics"] == written.metrics
    assert written.seconds["evaluate cache"] > 0


@pytest.mark.slow
def test_a_policy_for_another_machine_costs_no_finished_work(bundled, recipe, tmp_path, capsys):
    """Offloading to the host is for GPUs: what was compressed on a CPU is measured without, complete, and says what cannot run here."""
    there = recipe(bundled, {"kv_cache": {**FEW, "offload": "host"}}, evaluate={**HELDOUT, **UNLIMITED}) | {
        "sample": "import os"
    }
    file = tmp_path / "host.yaml"
    file.write_text(json.dumps(there), encoding="utf-8")
    apply = ["apply", str(file), "--output", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*apply, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metrics"]["perplexity_with_cache"] > 1
    assert result["samples"]["source"]
    assert result["samples"]["artifact"] is None
    reason = result["samples"]["left_out"]["artifact"]
    assert "kv_cache: offload: host is for caches of a GPU" in reason
    assert main([*apply, "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "Already finished" in shown
    assert f"The artifact has no sample output: {reason}" in shown
    with pytest.raises(ValueError, match="offload"):
        runtime.load(tmp_path / "out", device="cpu")


def test_without_a_policy_no_cache_is_measured(make_checkpoint, recipe, text, tmp_path):
    evaluation = {
        **UNLIMITED,
        "data": str(text),
        "sequence_length": 32,
        "samples": 2,
        "max_perplexity_increase": "300%",
    }
    written = compress.apply(recipe(make_checkpoint(), RTN, evaluate=evaluation), output=tmp_path / "out", quiet=True)
    assert not [key for key in written.metrics if "cache" in key or "overall" in key]
    assert [limit["name"] for limit in written.metrics["limits"]] == ["max_perplexity_increase"]


def test_what_does_not_fit_is_not_measured_and_keeps_no_limit(make_checkpoint, recipe, text, tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.system.memory.available_bytes", lambda device: 1000)
    evaluation = {**UNLIMITED, "data": str(text), "sequence_length": 32, "samples": 2}
    model = make_checkpoint()
    written = compress.apply(recipe(model, RTN, KV4, evaluate=evaluation), output=tmp_path / "out", quiet=True)
    (warning,) = [
        sentence for sentence in written.warnings if "quality of the compressed cache is not measured" in sentence
    ]
    assert written.metrics["kv_cache"] == {"warning": warning}
    assert warning in (written.path / "report.html").read_text(encoding="utf-8")
    limited = {**evaluation, "max_perplexity_increase": "300%"}
    with pytest.raises(LimitError, match=r"max_perplexity_increase_overall.*3"):
        compress.apply(recipe(model, RTN, KV4, evaluate=limited), output=tmp_path / "limited", quiet=True)
    assert "not measured" in (tmp_path / "limited" / "report.html").read_text(encoding="utf-8")


def test_prefix_tokens_shorten_the_windows(make_checkpoint, recipe, text, tmp_path):
    from runtime.kv_cache.policy.calibrated import fingerprint
    from runtime.modeling.skeleton import read_config

    model = make_checkpoint()
    known = {"fingerprint": fingerprint(read_config(model)), "prefix_tokens": [7, 8]}
    stage = {"kv_cache": {"method": "prefixquant", "recent": 8, "calibrated": known}}
    evaluation = {**UNLIMITED, "data": str(text), "sequence_length": 128, "samples": 2}
    written = compress.apply(recipe(model, stage, evaluate=evaluation), output=tmp_path / "out", quiet=True)
    assert written.metrics["sequence_length"] == 128
    assert written.metrics["kv_cache"]["sequence_length"] == 126


def test_windows_too_short_for_a_cache_are_refused_at_once(make_checkpoint, recipe, text, tmp_path):
    evaluation = {"data": str(text), "sequence_length": 2, "samples": 2}
    with pytest.raises(RequestError, match=r"evaluate\.sequence_length"):
        compress.apply(recipe(make_checkpoint(), KV4, evaluate=evaluation), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


RECIPE = """name: x
model: {model}
stages:
  - kv_cache:
      evict: {{score: snapkv, tokens: 16}}
      keys: int4
"""


def test_a_wrong_policy_names_file_line_and_key(make_checkpoint, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPE.format(model=make_checkpoint()), encoding="utf-8")
    assert main(["plan", str(file)]) == 2
    assert f"{file}:5: stages.0.kv_cache.evict.tokens: 16 tokens are not more than" in capsys.readouterr().err
    assert (
        main(["plan", str(file), "--set", "stages.0.kv_cache.evict.tokens=64", "--set", "stages.0.kv_cache.keys=int3"])
        == 2
    )
    assert "--set stages.0.kv_cache.keys=int3: stages.0.kv_cache.keys: unknown codec" in capsys.readouterr().err


def test_a_model_has_one_cache(make_checkpoint, recipe):
    with pytest.raises(RequestError, match=r"stages\.1\.kv_cache"):
        load(recipe(make_checkpoint(), KV4, {"kv_cache": "kivi"}))


def test_models_without_such_a_cache_are_refused_with_the_place(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint("gemma2", layer_types=["sliding_attention"] * 2)
    with pytest.raises(RequestError, match=r"stages\.1\.kv_cache: Gemma2ForCausalLM"):
        compress.apply(recipe(model, RTN, KV4), output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_plans_and_inspections_say_what_the_cache_takes(make_checkpoint, recipe, tmp_path, capsys):
    from compress.run.plan import make_plan

    model = make_checkpoint("qwen3", head_dim=32, max_position_embeddings=2048)
    plan = make_plan(load(recipe(model, RTN, KV4)), device="cpu").to_dict()["kv_cache"]
    (row,) = plan["bytes"]
    assert row["tokens"] == 1024
    assert 0.2 * row["full_bytes"] < row["bytes"] < 0.45 * row["full_bytes"]
    assert row["full_bytes"] == 2 * 2 * 2 * 32 * 2 * 1024
    path = compress.apply(recipe(model, RTN, KV4), output=tmp_path / "out", quiet=True).path
    capsys.readouterr()
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "KV cache: keys int4, values int4" in shown
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_cache"]["recent"] == 32


def test_a_stage_adds_what_it_likes_to_the_plan(make_checkpoint, recipe, monkeypatch):
    from compress.kv_cache.stage import CheckedCache
    from compress.run.plan import make_plan

    monkeypatch.setattr(CheckedCache, "plan", lambda self, context: {"own": [1, 2]})
    plan = make_plan(load(recipe(make_checkpoint(), RTN, KV4)), device="cpu")
    assert plan.kv_cache is None
    assert plan.to_dict()["own"] == [1, 2]


def test_a_sliding_window_keeps_its_own_cache(make_checkpoint):
    """Gemma 2: every other layer; scores are capped in all of them."""
    model = make_checkpoint("gemma2", num_hidden_layers=4)
    prompts = [list(range(1, 60)), [7, 8, 9]]
    expected = runtime.load(model, device="cpu", dtype="float32", kv_cache=False).generate(prompts, max_new_tokens=8)
    held = runtime.load(model, device="cpu", dtype="float32", kv_cache={"keys": "int4", "recent": 128})
    assert held.generate(prompts, max_new_tokens=8) == expected
    assert [name for name in held.explain() if name.startswith("kv_cache")] == ["kv_cache.1", "kv_cache.3"]


def test_the_command_line_takes_a_policy(make_checkpoint, tmp_path: Path, capsys):
    model = str(make_checkpoint())
    file = tmp_path / "policy.json"
    file.write_text('{"keys": "int8"}', encoding="utf-8")
    for policy, described in (
        ("kivi", "keys int2, values int2"),
        ('{"keys": "fp8"}', "keys fp8"),
        (str(file), "keys int8"),
    ):
        assert main(["generate", model, "abc", "-n", "2", "--kv-cache", policy, "--json", "--device", "cpu"]) == 0
        assert described in json.loads(capsys.readouterr().out)["stats"]["kv_cache"]
    assert main(["generate", model, "abc", "--kv-cache", "kiwi"]) == 2
    assert "did you mean 'kivi'" in capsys.readouterr().err
