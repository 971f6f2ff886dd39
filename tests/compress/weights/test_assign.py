"""Assignment: which stage acts on which module, and what does not fit."""

from __future__ import annotations

import pytest

from compress.recipe import load
from compress.recipe.targets import ModuleInfo
from compress.weights.assign import Uncompressed, assign
from runtime.errors import RequestError
from runtime.formats.scheme import GridScheme, Scheme


def model(width=64, inner=172, layers=2):
    modules = [ModuleInfo("model.embed_tokens", "Embedding", (100, width))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        modules += [
            ModuleInfo(f"{prefix}.self_attn.q_proj", "Linear", (width, width)),
            ModuleInfo(f"{prefix}.mlp.down_proj", "Linear", (width, inner)),
        ]
    return [*modules, ModuleInfo("lm_head", "Linear", (100, width))]


def recipe(*stages, **keys):
    return load({"name": "t", "model": "m", "stages": list(stages), **keys})


def tasks(*stages, modules=None):
    return assign(recipe(*stages), modules or model())[0]


def refused(tmp_path, text, modules=None):
    path = tmp_path / "r.yaml"
    path.write_text("name: t\nmodel: m\nstages:\n" + text)
    loaded = load(path)
    with pytest.raises(RequestError) as caught:
        assign(loaded, model() if modules is None else modules)
    return str(caught.value).removeprefix(f"{path}:")


def test_defaults_take_every_linear_layer_but_the_head():
    found = tasks({"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}})
    assert list(found) == [f"model.layers.{n}.{m}" for n in range(2) for m in ("self_attn.q_proj", "mlp.down_proj")]
    entry = found["model.layers.0.mlp.down_proj"]
    assert entry.scheme == Scheme(GridScheme(4, "int", True, "group", 32))
    assert entry.prune is None
    assert entry.quantize is not None
    assert entry.quantize.method == "rtn"


def test_prune_and_quantize_meet_in_one_assignment():
    stages = [
        {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
        {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}},
    ]
    entry = tasks(*stages)["model.layers.1.self_attn.q_proj"]
    assert entry.scheme == Scheme(GridScheme(4, "int", True, "group", 32), None, "2:4")
    assert (entry.prune.method, entry.quantize.method) == ("sparsegpt", "gptq")


def test_pruning_alone_keeps_float_values():
    found = tasks({"prune": {"method": "magnitude", "sparsity": 0.5}})
    assert {entry.scheme for entry in found.values()} == {Scheme(sparsity="unstructured")}


def test_later_stages_of_a_kind_override_earlier_ones():
    stages = [
        {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}},
        {"quantize": {"method": "rtn", "bits": 8, "group_size": "channel", "targets": ["down_proj"]}},
    ]
    found = tasks(*stages)
    first, second = found["model.layers.0.self_attn.q_proj"], found["model.layers.0.mlp.down_proj"]
    assert (first.quantize.method, second.quantize.method) == ("gptq", "rtn")
    assert second.scheme.weights == GridScheme(8, "int", True, "channel")


def test_head_and_embedding_when_they_are_named():
    found = tasks({"quantize": {"method": "rtn", "bits": 8, "group_size": 32, "targets": ["lm_head", "Embedding"]}})
    assert list(found) == ["model.embed_tokens", "lm_head"]


def test_ignoring_the_head_is_fine_where_there_is_none():
    modules = [module for module in model() if module.name != "lm_head"]
    grid = {"method": "rtn", "bits": 8, "group_size": 32, "ignore": ["lm_head"]}
    found = tasks({"quantize": grid}, modules=modules)
    assert len(found) == 4


CASES = {
    "target that matches nothing": (
        "  - quantize:\n      method: rtn\n      group_size: 32\n      targets:\n        - Linear\n        - down_porj\n",
        "9: stages.0.quantize.targets.1: 'down_porj' ",
    ),
    "ignore that matches nothing": (
        "  - quantize:\n      method: rtn\n      group_size: 32\n      ignore: [lm_head, gate_proj]\n",
        "7: stages.0.quantize.ignore.1: 'gate_proj' ",
    ),
    "ignore that takes all away": (
        "  - prune:\n      method: wanda\n      sparsity: 0.5\n      targets: [down_proj]\n      ignore: ['*']\n",
        "7: stages.0.prune.targets: ",
    ),
    "group larger than the row": (
        "  - quantize:\n      method: rtn\n      group_size: 128\n",
        "6: stages.0.quantize.group_size: model.layers.0.self_attn.q_proj: group_size 128 ",
    ),
    "default group larger than the row": (
        "  - quantize:\n      method: rtn\n",
        "4: stages.0.quantize.group_size: model.layers.0.self_attn.q_proj: group_size 128 ",
    ),
    "width not divisible by M": (
        "  - prune:\n      method: wanda\n      pattern: 2:5\n",
        "6: stages.0.prune.pattern: model.layers.0.self_attn.q_proj: pattern '2:5' ",
    ),
    "2:4 on an odd width": (
        "  - prune: {method: wanda, pattern: 2:4, targets: [down_proj]}\n",
        "4: stages.0.prune.pattern: model.layers.0.mlp.down_proj: pattern '2:4' ",
    ),
    "blocks that do not fit": (
        "  - prune:\n      method: wanda\n      pattern: block:7x4\n      sparsity: 0.5\n",
        "6: stages.0.prune.pattern: model.layers.0.self_attn.q_proj: pattern 'block:7x4' ",
    ),
    "prune after quantize": (
        "  - quantize:\n      method: gptq\n      group_size: 32\n  - prune:\n      method: wanda\n      pattern: 2:4\n",
        "7: stages.1.prune: 'model.layers.0.self_attn.q_proj' ",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_names_file_line_key_and_module(tmp_path, case):
    text, words = CASES[case]
    modules = model(inner=170) if "odd" in case else None
    answer = refused(tmp_path, text, modules)
    assert answer.startswith(words)
    assert "\n" not in answer


def test_pruning_after_quantizing_other_modules_is_allowed():
    stages = [
        {"quantize": {"method": "rtn", "group_size": 32, "targets": ["q_proj"]}},
        {"prune": {"method": "magnitude", "sparsity": 0.5, "targets": ["down_proj"]}},
    ]
    found = tasks(*stages)
    first, second = found["model.layers.0.self_attn.q_proj"], found["model.layers.0.mlp.down_proj"]
    assert (first.prune, first.quantize.method) == (None, "rtn")
    assert (second.prune.method, second.quantize) == ("magnitude", None)


def test_an_override_is_named_instead_of_the_line():
    loaded = load(
        {"name": "t", "model": "m", "stages": [{"quantize": {"method": "rtn"}}]},
        set=["stages.0.quantize.group_size=100"],
    )
    with pytest.raises(
        RequestError,
        match=r"^--set stages\.0\.quantize\.group_size=100: stages\.0\.quantize\.group_size: model\.layers\.0",
    ):
        assign(loaded, model())


def test_a_ragged_last_group_is_stored():
    found = tasks({"quantize": {"method": "rtn", "bits": 4, "group_size": 48}})
    assert found["model.layers.0.mlp.down_proj"].scheme.weights.group_size == 48


GRID = {"quantize": {"method": "rtn", "scheme": "W4A16", "group_size": 32}}


def with_narrow(rows=16):
    return [*model(), ModuleInfo("model.layers.0.mix", "Linear", (rows, 4))]


def test_few_layers_narrower_than_a_group_stay_where_nobody_names_them():
    stages = {"prune": {"method": "magnitude", "sparsity": 0.5}}, GRID
    found, left = assign(recipe(*stages), with_narrow())
    assert left == [Uncompressed("model.layers.0.mix", "rows of 4 weights, and groups of 32")]
    assert found == tasks(*stages)
    assert assign(recipe(GRID), model())[1] == []


def test_a_trellis_leaves_narrow_layers_too():
    scheme = {"representation": "trellis", "group_size": 32}
    modules = [ModuleInfo("model.layers.0.wide", "Linear", (64, 64)), with_narrow()[-1]]
    found, left = assign(recipe({"quantize": {"method": "gptq", "scheme": scheme, "quality": "best"}}), modules)
    assert left == [Uncompressed("model.layers.0.mix", "rows of 4 weights, and groups of 32")]
    assert list(found) == ["model.layers.0.wide"]


@pytest.mark.parametrize(
    "fields",
    [
        {"scheme": "W4A16_CODEBOOK"},
        {"scheme": {"representation": "row_codebook", "outliers": 0.01}},
        {"bits": 4.5, "group_size": 32, "candidates": [4, "W4A16_CODEBOOK"]},
        {"scheme": "TERNARY"},
    ],
    ids=str,
)
def test_codebooks_are_not_trained(fields):
    """Also where only a candidate of a budget has them."""
    stages = {"quantize": {"method": "gptq", **fields}}, {"recover": {"method": "finetune"}}
    with pytest.raises(
        RequestError, match=r"stages\.1\.recover: recovery trains weights on a grid, and .*(codebook 4 bits|ternary)"
    ):
        assign(recipe(*stages), model())


def test_many_weights_in_narrow_layers_are_an_unfit_group_size():
    with pytest.raises(RequestError, match=r"model\.layers\.0\.mix: group_size 32"):
        assign(recipe(GRID), with_narrow(rows=2000))


@pytest.mark.parametrize("targets", [["mix"], ["Linear"]])
def test_a_narrow_layer_that_is_meant_is_refused(targets):
    with pytest.raises(RequestError, match=r"model\.layers\.0\.mix: group_size 32"):
        assign(recipe({"quantize": {**GRID["quantize"], "targets": targets}}), with_narrow())
    ignoring = {"quantize": {**GRID["quantize"], "targets": ["Linear"], "ignore": ["lm_head", "mix"]}}
    assert assign(recipe(ignoring), with_narrow())[1] == []
