"""Every bundled recipe, through the real command line, with a tenth of its calibration text."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from family_models import FAMILIES

import runtime
from compress.cli import main
from compress.core.resources import bundled_recipes
from compress.quantize.transforms import flatquant
from compress.recipe import load, locate_model
from runtime.checkpoint.artifact import Artifact

# Recipes for models that do not come along.
NEEDS_MODEL = {"bert_w8a8", "qwen_moe_ternary", "qwen_moe_w4", "vlm_w4"}
RECIPES = {name: path for name, path in bundled_recipes().items() if name not in NEEDS_MODEL}
QUICK = ["calibration.samples=16", "calibration.sequence_length=128", "evaluate.samples=16"]
QUICK += ["evaluate.max_kl=0.6", "evaluate.min_agreement=40%"]  # so little text costs more than the usual limits allow

# Of recipes that train: few of their steps.
DRAFT = {"steps": 8, "samples": 40, "sequence_length": 64}
SHORTER = {
    "llama_w4_draft": [f"1.draft.{field}={value}" for field, value in DRAFT.items()],
    "llama_small_w4": [
        "1.recover.steps=15",
        "1.recover.samples=60",
        *(f"4.draft.{field}={value}" for field, value in DRAFT.items()),
    ],
}

# Bits a weight of the compressed matrices, scales included: what the recipe promises, with little room above it.
BITS = {
    "llama_w4_sparse": 3.2,
    "llama_w4": 4.2,
    "llama_w4_draft": 4.2,
    "llama_small_w4": 3.2,
    "llama_kv4": 4.2,
    "llama_w4_tensorrt": 4.2,
    "llama_w4afp8": 4.2,
    "llama_w4a4": 4.3,
    "llama_nvfp4": 4.6,
    "llama_mxfp4": 4.3,
    "llama_w8a8": 8.2,
    "llama_fp8": 8.2,
    "llama_sparse50": 9.3,
    "llama_w3": 3.3,
    "llama_3.5bit": 3.5,
    "llama_w2_best": 2.3,
    "llama_w2_trellis": 2.2,
    "llama_w4_codebook": 4.6,
    "llama_w3_best": 3.3,
    "llama_w4_best": 4.2,
    "llama_phone": 4.6,
    "llama_gguf_q4_k": 4.6,
    "llama_df11": 11.5,
}
LOSSLESS = {"llama_df11"}


QUICKEST = {"llama_w4_sparse", "llama_w8a8"}  # the others are slow
CASES = [pytest.param(name, marks=() if name in QUICKEST else pytest.mark.slow) for name in sorted(RECIPES)]


@pytest.fixture(scope="module", params=CASES)
def applied(request, tmp_path_factory):
    """Name of the recipe, its output directory, and what `compress apply --json` printed."""
    output = tmp_path_factory.mktemp(request.param) / "artifact"
    quick = [*QUICK, *(f"stages.{key}" for key in SHORTER.get(request.param, ()))]
    options = [text for key in quick for text in ("--set", key)]
    out, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        patch.setattr(flatquant, "STEPS", 40)  # which no field of a recipe sets
        code = main(["apply", request.param, "--output", str(output), "--json", "--device", "cpu", *options])
    assert code == 0, errors.getvalue()[-2000:]
    return request.param, output, json.loads(out.getvalue())


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_bundled_recipe_is_complete(name):
    recipe = load(name)
    assert recipe.name == name
    assert recipe.description
    assert recipe.output == f"out/{name}"
    assert recipe.sample
    assert recipe.evaluate is not None
    assert "max_perplexity_increase" in recipe.evaluate.limits()
    assert (locate_model(recipe) / "config.json").is_file()
    assert RECIPES[name].read_text(encoding="utf-8").startswith("# "), "the file says first what it is for"


def test_the_set_of_recipes():
    assert set(BITS) <= set(RECIPES)
    assert set(bundled_recipes()) >= NEEDS_MODEL


@pytest.mark.parametrize("name", sorted(NEEDS_MODEL))
def test_a_recipe_for_a_model_of_ones_own_is_complete(name):
    recipe = load(name)
    assert recipe.name == name
    assert recipe.description
    assert recipe.output == f"out/{name}"
    assert recipe.evaluate is not None
    assert recipe.evaluate.limits()


def test_quality_is_within_the_recipes_own_limits(applied):
    name, _, printed = applied
    metrics = printed["metrics"]
    assert math.isfinite(metrics["after"]["perplexity"])
    assert metrics["limits"]
    assert all(limit["ok"] for limit in metrics["limits"])
    assert 0 <= metrics["kl"] < 1
    same = metrics["after"]["perplexity"] == metrics["before"]["perplexity"]
    assert same == (name in LOSSLESS), "the artifact is the original where nothing is lost, else not"
    assert name not in LOSSLESS or metrics["kl"] == 0


def test_size_is_what_the_recipe_promises(applied):
    name, output, printed = applied
    manifest = Artifact(output).manifest
    assert manifest is not None
    packed = {key: entry for key, entry in manifest["tensors"].items() if entry["action"] == "compressed"}
    source = {key: entry["bytes_before"] // 2 for key, entry in packed.items()}  # bf16
    bits = 8 * sum(entry["bytes_after"] for entry in packed.values()) / sum(source.values())
    assert bits <= BITS[name]
    assert len(packed) == 4 * 7
    assert printed["bytes"]["after"] < printed["bytes"]["before"]


def test_the_artifact_writes(applied):
    _, output, printed = applied
    prompt, text = printed["sample"]["prompt"], printed["sample"]["text"]
    assert text.strip()
    model = runtime.load(output, device="cpu")
    again = model.generate(prompt, max_new_tokens=48)
    assert again == text, "greedy decoding says the same again"
    logits = model.logits(torch.tensor([[5, 6, 7]]))
    assert logits.shape == (1, 3, 4096)
    assert bool(logits.isfinite().all())


def test_the_resolved_recipe_in_the_artifact_is_a_recipe(applied):
    name, output, _ = applied
    again = load(output / "recipe.yaml")
    assert again.name == name
    assert again.calibration.samples == 16
    assert (output / "report.html").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("llama_w4", "qwen3"),
        ("llama_w4", "gemma3"),
        ("llama_kv4", "llama"),
        ("qwen_moe_w4", "qwen3_moe"),
        ("qwen_moe_w4", "mixtral"),
        ("qwen_moe_w4", "gpt_oss"),
        ("qwen_moe_ternary", "qwen3_moe"),
        ("qwen_moe_ternary", "mixtral"),
        ("vlm_w4", "qwen2_5_vl"),
        ("vlm_w4", "llava"),
        ("bert_w8a8", "bert"),
    ],
)
def test_recipes_fit_their_families(name, family, tiny_text, tmp_path):
    import compress

    model = next(each for each in FAMILIES if each.name == family).write(tmp_path / "model")
    small = {"samples": 4, "sequence_length": 32, "data": str(tiny_text)}
    change = {f"{part}.{key}": value for part in ("calibration", "evaluate") for key, value in small.items()}
    if family == "bert":
        change["evaluate.min_cosine"] = -1.0
    else:  # rows of 64, and of random weights no quality is asked
        change |= {"stages.0.quantize.group_size": 32, "evaluate.max_perplexity_increase": "100000%"}
        change |= {"evaluate.max_kl": 100.0, "evaluate.min_agreement": 0.0}
    made = compress.apply(name, model=model, output=tmp_path / "out", set=change, quiet=True)
    assert any(entry["action"] == "compressed" for entry in made.manifest["tensors"].values())
    loaded = runtime.load(made.path)
    if family == "bert":
        assert loaded.embed(["a text"]).isfinite().all()
    else:
        assert len(loaded.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True)) == 4
