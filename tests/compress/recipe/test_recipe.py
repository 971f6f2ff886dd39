# ruff: noqa: E501 (a case and its sentence stand in one line)
"""Recipes: what is read, and the sentence that answers each mistake."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from compress.recipe import Recipe, load
from compress.recipe.yaml_source import parse, parse_scalar
from runtime.errors import RequestError

GOOD = """\
name: test
model: some/model
calibration:
  data: bundled
  samples: 16
  sequence_length: 64
stages:
  - prune:
      method: sparsegpt
      pattern: 2:4
  - quantize:
      method: gptq
      scheme: W4A16
      group_size: 64
      damping: 1e-2
evaluate:
  data: bundled
  max_perplexity_increase: 10%
output: out/test
"""


@pytest.fixture
def write(tmp_path: Path):
    def make(text: str) -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return make


def sentence(source, **options) -> str:
    with pytest.raises(RequestError) as caught:
        load(source, **options)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_good_recipe_is_read_whole(write):
    recipe = load(write(GOOD))
    assert recipe.name == "test"
    assert recipe.calibration.samples == 16
    assert recipe.calibration.packing is True
    assert [(stage.kind, stage.method, stage.index) for stage in recipe.stages] == [
        ("prune", "sparsegpt", 0),
        ("quantize", "gptq", 1),
    ]
    assert recipe.stages[0].config.pattern == "2:4"
    assert recipe.stages[1].config.damping == 0.01
    assert recipe.evaluate is not None
    assert recipe.evaluate.limits() == {"max_perplexity_increase": pytest.approx(0.1)}
    assert recipe.output_directory == Path("out/test")
    assert recipe.true_sequential is True
    assert recipe.on_nonfinite == "fail"


def test_resolved_is_a_recipe_again_and_does_not_depend_on_the_output(write):
    recipe = load(write(GOOD))
    resolved = recipe.resolved()
    assert load(yaml.safe_load(yaml.safe_dump(resolved))).resolved() == resolved
    assert list(resolved)[:4] == ["name", "description", "model", "calibration"]
    assert resolved["stages"][1]["quantize"]["block_size"] == 128
    assert load(recipe, output="elsewhere").resolved() == resolved
    assert load(recipe, output="elsewhere").output == "elsewhere"
    assert load(recipe).output == "out/test"


def test_origin_names_the_line_of_every_key(write):
    path = write(GOOD)
    recipe = load(path)
    assert recipe.origin.place(("stages", 1, "quantize", "group_size")) == f"{path}:14"
    assert recipe.calibration.at("samples", "is wrong") == f"{path}:5: calibration.samples: is wrong"
    # A key that is absent: the line of what encloses it.
    assert recipe.origin.place(("calibration", "seed")) == f"{path}:3"
    assert recipe.origin.place(("stages", 0, "prune", "targets", 3)) == f"{path}:8"


def test_a_dictionary_and_options_replace_model_and_output():
    recipe = load(
        {"name": "d", "model": "m", "stages": [{"quantize": {"method": "rtn"}}]}, model="other", output="here"
    )
    assert (recipe.model, recipe.output) == ("other", "here")
    assert recipe.origin.place(("model",)) == "--model other"
    assert load({"name": "d", "model": "m", "stages": [{"quantize": {"method": "rtn"}}]}).output_directory == Path(
        "out/d"
    )


def test_a_dictionary_is_not_changed():
    data = {"name": "d", "model": "m", "stages": [{"quantize": {"method": "rtn"}}]}
    load(data, set=["stages.0.quantize.bits=3"])
    assert data == {"name": "d", "model": "m", "stages": [{"quantize": {"method": "rtn"}}]}


# Each case: replace `old` by `new` in GOOD; the sentence then has the line and these words.
MISTAKES = {
    "unknown key": ("group_size: 64", "grup_size: 64", 14, "stages.1.quantize.grup_size: unknown key; did you mean 'group_size'? Allowed: method"),
    "unknown top key": ("output: out", "outptu: out", 19, "outptu: unknown key; did you mean 'output'? Allowed: name, description, model"),
    "unknown calibration key": ("samples: 16", "sample: 16", 5, "calibration.sample: unknown key; did you mean 'samples'?"),
    "unknown evaluate key": ("max_perplexity_increase", "max_perplexety", 18, "evaluate.max_perplexety: unknown key; did you mean 'max_perplexity'?"),
    "key without a near name": ("group_size: 64", "zzz: 64", 14, "stages.1.quantize.zzz: unknown key. Allowed: method"),
    "wrong integer": ("samples: 16", "samples: many", 5, "calibration.samples: expected an integer between 1 and 1000000, got 'many'"),
    "quoted integer": ("samples: 16", "samples: '16'", 5, "calibration.samples: expected an integer between 1 and 1000000, got '16'"),
    "boolean for integer": ("samples: 16", "samples: true", 5, "expected an integer between 1 and 1000000, got true"),
    "fraction for integer": ("samples: 16", "samples: 1.5", 5, "expected an integer between 1 and 1000000, got 1.5"),
    "out of range": ("samples: 16", "samples: 0", 5, "calibration.samples: expected an integer between 1 and 1000000, got 0"),
    "wrong bits": ("scheme: W4A16", "bits: four", 13, "stages.1.quantize.bits: expected a number between 2 and 8, got 'four'"),
    "bits too large": ("scheme: W4A16", "bits: 16", 13, "stages.1.quantize.bits: expected a number between 2 and 8, got 16"),
    "wrong boolean": ("scheme: W4A16", "symmetric: yes", 13, "stages.1.quantize.symmetric: expected true or false, got 'yes'"),
    "wrong union": ("group_size: 64", "group_size: big", 14, "expected an integer or one of channel, tensor, got 'big'"),
    "wrong number": ("damping: 1e-2", "damping: -1", 15, "stages.1.quantize.damping: expected a number above 0 and at most 1, got -1"),
    "not a number": ("damping: 1e-2", "damping: .nan", 15, "stages.1.quantize.damping: expected a number"),
    "targets no list": ("group_size: 64", "targets: Linear", 14, "stages.1.quantize.targets: expected a list of texts, got 'Linear'"),
    "targets of numbers": ("group_size: 64", "targets: [7]", 14, "stages.1.quantize.targets: expected a list of texts, got 7"),
    "bad expression": ("group_size: 64", "targets: ['re:(']", 14, "stages.1.quantize.targets: 're:(' is not a regular expression: missing )"),
    "bad expression in prune": ("pattern: 2:4", "pattern: 2:4\n      ignore: ['re:[']", 11, "stages.0.prune.ignore: 're:[' is not a regular expression"),
    "no targets": ("group_size: 64", "targets: []", 14, "stages.1.quantize.targets: the list is empty"),
    "unknown method": ("method: gptq", "method: gtpq", 12, "stages.1.quantize.method: unknown method 'gtpq'; did you mean 'gptq'? Allowed: rtn"),
    "method no text": ("method: gptq", "method: [gptq]", 12, "stages.1.quantize.method: unknown method a list of 1"),
    "method of the other kind": ("method: gptq", "method: wanda", 12, "stages.1.quantize.method: unknown method 'wanda'"),
    "method missing": ("      method: sparsegpt\n", "", 8, "stages.0.prune: the key 'method' is missing; it is one of magnitude"),
    "unknown stage": ("- quantize:", "- quantise:", 11, "stages.1.quantise: unknown stage; did you mean 'quantize'? Allowed: structure, rotate, permute, prune, quantize"),
    "unknown scheme": ("W4A16", "W4A17", 13, "did you mean 'W4A16'"),
    "N above M": ("2:4", "5:4", 10, "stages.0.prune.pattern: pattern '5:4'"),
    "unknown pattern": ("2:4", "blocks", 10, "pattern 'blocks' is unknown"),
    "pattern and sparsity differ": ("pattern: 2:4", "pattern: 2:4\n      sparsity: 0.7", 10, "sparsity of 0.5, not 0.7"),
    "pattern without sparsity": ("pattern: 2:4", "pattern: unstructured", 10, "pattern 'unstructured' needs 'sparsity'"),
    "neither pattern nor sparsity": ("      pattern: 2:4\n", "", 8, "needs 'sparsity'"),
    "all of a share": ("- prune:\n      method: sparsegpt\n      pattern: 2:4", "- structure:\n      method: obs\n      ratio: 120%", 10, "stages.0.structure.ratio: expected a number above 0 and below 1, got '120%'"),
    "none of a share": ("- prune:\n      method: sparsegpt\n      pattern: 2:4", "- structure:\n      method: obs\n      budget: {flops: 0}", 10, "structure.budget.flops: expected a number above 0 and below 1, got 0"),
    "no share": ("- prune:\n      method: sparsegpt\n      pattern: 2:4", "- structure:\n      method: obs\n      ratio: 3000000", 10, "or a fraction such as 0.1, got 3000000"),
    "too few widths": ("- prune:\n      method: sparsegpt\n      pattern: 2:4", "- recover:\n      method: matformer\n      widths: [50%]", 10, "recover.widths: expected a list of 2 or more numbers above 0 and at most 1, got a list of 1"),
    "sparsity too large": ("pattern: 2:4", "sparsity: 1.0", 10, "stages.0.prune.sparsity: expected a number at least 0 and below 1, got 1.0"),
    "sparsity negative": ("pattern: 2:4", "sparsity: -0.5", 10, "stages.0.prune.sparsity: expected a number at least 0 and below 1, got -0.5"),
    "fp8 asymmetric": ("scheme: W4A16\n      group_size: 64", "scheme: FP8\n      symmetric: false", 13, "fp8, which has no zero point"),
    "fp8 with groups": ("scheme: W4A16", "scheme: FP8", 14, "fp8 weights have one scale a row or one in all"),
    "fp8 with 4 bits": ("scheme: W4A16\n      group_size: 64", "scheme: FP8\n      bits: 4", 13, "bits must be 8, not 4"),
    "group size 0": ("group_size: 64", "group_size: 0", 14, "group_size 0 is not possible"),
    "activation mode alone": ("group_size: 64", "activation_mode: static", 14, "the activations are not quantized"),
    "int activations on float weights": ("scheme: W4A16\n      group_size: 64", "scheme: FP8\n      activations: int8", 14, "activations 'int8' do not go with float weights"),
    "bare percentage": ("10%", "10", 18, "expected a percentage such as 10% or a fraction such as 0.1, got 10; did you mean 10%?"),
    "text percentage": ("10%", "ten", 18, "expected a percentage such as 10% or a fraction such as 0.1, got 'ten'"),
    "negative limit": ("max_perplexity_increase: 10%", "max_kl: -1", 18, "evaluate.max_kl: expected a number at least 0 or one of auto, none, got -1"),
    "agreement above 1": ("max_perplexity_increase: 10%", "min_agreement: 120%", 18, "evaluate.min_agreement: expected"),
    "null name": ("name: test", "name:", 1, "name: expected a text, got nothing"),
    "name of dots": ("name: test", "name: ..", 1, "name: expected letters, digits, '_', '-', '.', and not dots alone"),
    "name with a slash": ("name: test", "name: ../x", 1, "name: expected letters, digits"),
    "calibration no mapping": ("calibration:\n  data: bundled\n  samples: 16\n  sequence_length: 64", "calibration: bundled", 3, "calibration: expected a mapping of keys (data, "),
    "choice": ("output: out/test", "on_nonfinite: skipp", 19, "on_nonfinite: expected one of fail, skip, got 'skipp'; did you mean 'skip'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_each_mistake_names_line_key_found_and_allowed(write, case):
    old, new, line, words = MISTAKES[case]
    assert old in GOOD
    path = write(GOOD.replace(old, new, 1))
    text = sentence(path)
    assert text.startswith(f"{path}:{line}: "), text
    assert words in text
    assert "\n" not in text, "one problem, one sentence"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", "", "a recipe is a mapping of keys (name, description, model"),
        ("just words", ":1", "a recipe is a mapping of keys"),
        ("- a\n- b\n", ":1", "a recipe is a mapping of keys (name, description, model, calibration"),
        ("name: [1, 2\nmodel: x", ":2", "not YAML"),
        ("name: 'x\n", ":2", "not YAML"),
        ("a: b: c\n", ":1", "not YAML: mapping values are not allowed here"),
        ("name: x\ncalibration:\n\tsamples: 4\n", ":3", "a tab is used for indentation; YAML allows only spaces"),
        ("name: x\ncalibration:\n  data: bundled\n \tsamples: 4\n", ":4", "a tab is used for indentation"),
        ("name:\t\tx\tmodel\n\t- y: [", "", "tab"),
        ("name: x\nname: y\n", ":2", "name: this key is already given in line 1; give it once"),
        ("calibration:\n  data: a\n  samples: 3\n  data: b\n", ":4", "calibration.data: this key is already given in line 2"),
        ("name: !!python/object/apply:os.system ['ls']\n", ":1", "the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not allowed"),
        ("name: !mine x\n", ":1", "the tag '!mine' is not allowed"),
        ("!!str name: x\n", ":1", "is not allowed"),
        ("? [a, b]\n: x\n", ":1", "a key must be a plain word"),
        ("name: x\n---\nname: y\n", ":2", "a recipe is one YAML document"),
        ("name: *nothing\n", ":1", "the alias '*nothing' names no anchor"),
        ("name: &a [*a]\n", ":1", "the alias '*a' names no anchor"),
        ("a: " + "[" * 60 + "]" * 60, ":1", "nested deeper than 20 levels"),
        ("name: x\nmodel: \x07\n", "", "not YAML"),
        ("name: x\nmodel: m\n", ":1", "stages: this key is required"),
        ("name: x\nmodel: m\nstages:\n", ":3", "stages: expected one stage or more (structure: ..., rotate: ..., permute: ..., prune: ..., quantize: ..., recover: ..., kv_cache: ..., draft: ...), got nothing"),
        ("name: x\nmodel: m\nstages: []\n", ":3", "stages: expected one stage or more"),
        ("name: x\nmodel: m\nstages: {prune: {}}\n", ":3", "stages: expected one stage or more"),
        ("name: x\nmodel: m\nstages: [gptq]\n", ":3", "stages.0: a stage is one key with its settings below, one of structure, rotate, permute, prune, quantize, recover, kv_cache, draft; got 'gptq'"),
        ("name: x\nmodel: m\nstages:\n  - {}\n", ":4", "stages.0: a stage is one key with its settings below"),
        ("name: x\nmodel: m\nstages:\n  - prune: {method: wanda}\n    quantize: {method: rtn}\n", ":4", "got the keys prune, quantize"),
        ("name: x\nmodel: m\nstages:\n  - quantize: rtn\n", ":4", "stages.0.quantize: expected a mapping with a method, such as {method: rtn}, got 'rtn'"),
        ("model: m\nstages:\n  - quantize: {method: rtn}\n", ":1", "name: this key is required: a text"),
        ("name: x\nstages:\n  - quantize: {method: rtn}\n", ":1", "model: this key is required: a text"),
    ],
)  # fmt: skip
def test_files_that_are_no_recipe(write, text, line, words):
    path = write(text)
    answer = sentence(path)
    assert answer.startswith(f"{path}{line}"), answer
    assert words in answer


def test_all_problems_are_listed_one_a_line(write):
    text = (
        GOOD.replace("samples: 16", "samples: x")
        .replace("group_size: 64", "grup: 1\n      bits: 99")
        .replace("sparsegpt", "sparse")
    )
    lines = sentence(write(text)).splitlines()
    assert len(lines) == 4
    for words in ("calibration.samples", "stages.0.prune.method", "stages.1.quantize.grup", "stages.1.quantize.bits"):
        assert sum(words in line for line in lines) == 1


def test_ten_thousand_stages_answer_at_once(write):
    path = write("name: x\nmodel: m\nstages:\n" + "  - quantize: {method: rtn, bits: 4}\n" * 10_000)
    start = time.process_time()
    answer = sentence(path)
    assert time.process_time() - start < 1
    assert answer == f"{path}:104: stages: more than 100 entries; at most 100 are allowed"


def test_too_many_stages_in_a_dictionary():
    stages = [{"quantize": {"method": "rtn"}}] * 10_000
    assert (
        sentence({"name": "x", "model": "m", "stages": stages})
        == "recipe: stages: 10000 stages; at most 100 are allowed"
    )


def test_an_alias_bomb_is_refused_at_once(write):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    start = time.process_time()
    assert "more than 20,000 values (aliases expanded)" in sentence(write("\n".join(lines)))
    assert time.process_time() - start < 1


def test_anchors_and_aliases_work(write):
    text = GOOD.replace("group_size: 64", "targets: &t ['*.mlp.*']\n      ignore: *t")
    assert load(write(text)).stages[1].config.ignore == ["*.mlp.*"]


def test_a_huge_file_is_not_read(write):
    assert "2,000,000 bytes; at most 1,000,000 are allowed" in sentence(write("#" * 2_000_000))


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"name: \xff\xfe\x00")
    assert sentence(path) == f"{path}: not a YAML text file (byte 6 is not UTF-8)"


def test_a_byte_order_mark_is_harmless(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(GOOD, encoding="utf-8-sig")
    assert load(path).name == "test"


def test_missing_files_name_the_nearest(write, tmp_path):
    path = write(GOOD)
    assert f"no such recipe file; did you mean '{path}'?" in sentence(tmp_path / "xx.yaml")
    assert "did you mean 'llama_w4_sparse'?" in sentence("llama_w4_sparce")
    assert "did you mean the bundled recipe 'llama_w4'?" in sentence(tmp_path / "nowhere" / "llama_w4.yaml")
    assert "is a YAML file, but this is a directory" in sentence(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2:4", "2:4"), ("1e-3", 1e-3), ("1.5", 1.5), ("12", 12), ("-3", -3), ("0x10", 16), ("010", 10), ("no", "no"), ("yes", "yes"), ("on", "on"),
        ("true", True), ("False", False), ("", None), ("~", None), ("null", None), (".inf", float("inf")), ("-.INF", float("-inf")),
        ("2020-01-01", "2020-01-01"), ("1_000", "1_000"), (".", "."), ("9" * 5000, "9" * 5000), ("10%", "10%"),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text, value):
    found = parse_scalar(text)
    assert found == value
    assert type(found) is type(value)


def test_quoted_scalars_stay_text():
    data, lines = parse("a: '12'\nb: \"true\"\nc: |\n  x\n", "f")
    assert data == {"a": "12", "b": "true", "c": "x\n"}
    assert lines["b",] == 2


# ------------------------------------------------------------------ --set


def test_overrides_change_add_and_remove(write):
    recipe = load(
        write(GOOD),
        set=["calibration.samples=4", "stages.1.quantize.bits=3", "stages.1.quantize.targets=['*.mlp.*', Linear]", "seed=7", "evaluate=null", "model=a=b"],
    )  # fmt: skip
    assert recipe.calibration.samples == 4
    assert recipe.stages[1].config.bits == 3
    assert recipe.stages[1].config.targets == ["*.mlp.*", "Linear"]
    assert (recipe.seed, recipe.evaluate, recipe.model) == (7, None, "a=b")


def test_overrides_make_absent_sections(write):
    text = GOOD.replace("evaluate:\n  data: bundled\n  max_perplexity_increase: 10%\n", "")
    recipe = load(write(text), set=["evaluate.max_kl=0.5"])
    assert recipe.evaluate is not None
    assert recipe.evaluate.limits() == {"max_kl": 0.5}


def test_later_overrides_win(write):
    assert load(write(GOOD), set=["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", "KEY=VALUE"),
        ("=3", "calibration.samples"),
        ("a..b=3", "calibration.samples"),
        ("calibraton.samples=3", "calibraton: unknown key; did you mean 'calibration'?"),
        ("calibration.sampels=3", "calibration.sampels: unknown key; did you mean 'samples'?"),
        ("calibration.samples=x", "calibration.samples: expected an integer between 1 and 1000000, got 'x'"),
        ("stages.2.quantize.bits=3", "'stages.2' does not exist; 'stages' has 0 (prune), 1 (quantize)"),
        ("stages.-1.quantize.bits=3", "'stages.-1' does not exist"),
        ("stages.first.quantize.bits=3", "'stages.first' does not exist"),
        ("stages.0.quantize.bits=3", "stage 0 is 'prune', not 'quantize'"),
        ("stages.1.quantise.bits=3", "stage 1 is 'quantize', not 'quantise'; did you mean 'quantize'?"),
        ("stages.1.quantize.grup_size=3", "stages.1.quantize.grup_size: unknown key; did you mean 'group_size'?"),
        ("stages.0.prune.sparsity=0.7", "means a sparsity of 0.5, not 0.7"),
        ("model.x=3", "'model' is 'some/model', which has no key 'x'"),
        ("seed=[1", "not YAML"),
        ("seed=!!int 3", "the tag"),
    ],
)
def test_wrong_overrides_name_themselves(write, override, words):
    answer = sentence(write(GOOD), set=[override])
    assert answer.startswith(f"--set {override}"), answer
    assert words in answer


def test_a_recipe_knows_its_fields():
    assert set(Recipe.model_fields) >= {
        "name",
        "model",
        "calibration",
        "stages",
        "evaluate",
        "output",
        "seed",
        "on_nonfinite",
        "true_sequential",
    }


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/My-Model_1.5B", "out/d-My-Model_1.5B"),
        ("~/models/my llama/", "out/d-my-llama"),
        ("m", "out/d"),
        (".", f"out/d-{Path().resolve().name}"),
        ("/", "out/d-model"),
    ],
)
def test_the_output_is_named_after_another_model(model, name):
    data = {"name": "d", "model": "m", "stages": [{"quantize": {"method": "rtn"}}]}
    assert load(data, model=model).output_directory == Path(name)
    assert load(data | {"output": "out/d"}, model=model).output_directory == Path(name)
    assert load(data, model=model, output="here").output_directory == Path("here")
    assert load(data, model=model, set=["output=there"]).output_directory == Path("there")
    assert load(load(data, model=model)).output_directory == Path(name)
