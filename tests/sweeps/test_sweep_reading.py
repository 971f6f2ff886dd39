"""A wrong sweep file is answered with file, line, key, what was found and what is allowed."""

from __future__ import annotations

import pytest
import yaml

from compress.core.resources import bundled_sweeps
from compress.recipe import load
from compress.sweeps import load_sweep
from compress.sweeps.fit import first_recipe
from compress.sweeps.search import Grid
from runtime.errors import RequestError

GOOD = """name: mine
recipe: tiny.yaml
vary:
  stages.0.quantize.bits: [3, 4]
"""


@pytest.fixture
def file(recipe_file):
    """Writes a sweep beside the recipe."""

    def write(text, name="mine.yaml"):
        path = recipe_file.parent / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        (GOOD + "serach: grid\n", 5, "serach: unknown key; did you mean 'search'?"),
        (GOOD + "search: gird\n", 5, "search: expected grid, or a mapping with trials"),
        (GOOD + "search: {sampler: tpe}\n", 5, "search.trials: this key is required"),
        (GOOD + "search: {trials: 3, sampler: tpa}\n", 5, "expected one of tpe, random, nsgaii, got 'tpa'; did you mean 'tpe'?"),
        (GOOD + "search: {trials: 0}\n", 5, "search.trials: expected an integer"),
        (GOOD + "search: {trials: 3, population: 4}\n", 5, "search.population: only the sampler nsgaii has this key"),
        (GOOD + "objectives: [perplexity, sizes]\n", 5, "unknown metric 'sizes'; did you mean 'size'?"),
        (GOOD + "objectives: [size, size]\n", 5, "'size' is given twice"),
        (GOOD + "constraints: {size: 3}\n", 5, "constraints.size: expected {max: ...}"),
        (GOOD + "constraints: {size: {most: 3}}\n", 5, "constraints.size.most: unknown key. Allowed: min, max"),
        (GOOD + "constraints: {size: {max: 3 apples}}\n", 5, "must be a number of bytes or a text like '2GB'"),
        (GOOD + "constraints: {perplexity_increase: {max: 10}}\n", 5, "did you mean 10%?"),
        (GOOD + "constraints: {klx: {max: 1}}\n", 5, "constraints.klx: unknown metric; did you mean 'kl'?"),
        (GOOD + "speed: {promt_tokens: 3}\n", 5, "speed.promt_tokens: unknown key; did you mean 'prompt_tokens'?"),
        (GOOD + "ray: {cpu: 3}\n", 5, "ray.cpu: unknown key; did you mean 'cpus'?"),
        (GOOD + "ray: {}\njobs: 2\n", 6, "ray.at_once"),
        (GOOD + "keep: some\n", 5, "keep: expected one of best, pareto, all, none, got 'some'"),
        (GOOD + "jobs: two\n", 5, "jobs: expected an integer between 1 and 1024, got 'two'"),
        (GOOD.replace("tiny.yaml", "tony.yaml"), 2, "recipe: no recipe 'tony.yaml'"),
        (GOOD.replace("[3, 4]", "[3, 3]"), 4, "vary.stages.0.quantize.bits: 3 is given twice"),
        (GOOD.replace("stages.0.quantize.bits", "evaluate.samples"), 4, "'evaluate' cannot be varied"),
        (GOOD.replace("stages.0.quantize.bits", "stages..bits"), 4, "expected a dotted key"),
        (GOOD + "  stages.0.quantize: [{}]\n", 4, "'stages.0.quantize'"),
        (GOOD + "set: {stages.1.prune.sparsity: 0.5}\n", 5, "'stages.1' does not exist"),
        (GOOD.replace("mine", "'..'"), 1, "name: expected letters, digits, '_', '-', '.', and not dots alone, got '..'"),
        ("name: mine\nvary: {}\nrecipe: tiny.yaml\n", 2, "vary: "),
        ("- a\n", 1, "a sweep is a mapping of keys"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(file, text, place, said):
    path = file(text)
    with pytest.raises(RequestError) as raised:
        load_sweep(path)
    assert f"{path}:{place}: " in str(raised.value)
    assert said in str(raised.value)


def test_all_problems_are_told_at_once(file):
    with pytest.raises(RequestError) as raised:
        load_sweep(file(GOOD + "search: gird\nobjectives: [sizes]\nspeed: {a: 1}\n"))
    assert len(str(raised.value).splitlines()) == 3


def test_no_such_sweep(tmp_path):
    with pytest.raises(RequestError, match="'llama_bits'"):
        load_sweep("lama_bits")
    with pytest.raises(RequestError, match="directory"):
        load_sweep(tmp_path)


def test_a_recipe_without_evaluation_has_no_quality(file, recipe_file):
    recipe = yaml.safe_load(recipe_file.read_text())
    del recipe["evaluate"]
    recipe_file.write_text(yaml.safe_dump(recipe))
    with pytest.raises(RequestError, match="'evaluate'"):
        load_sweep(file(GOOD))
    sweep, _ = load_sweep(file(GOOD + "objectives: [size]\n"))
    assert sweep.file.objectives == ["size"]


def test_values_reach_the_recipe_and_their_errors_name_the_sweep(file):
    path = file(GOOD + "set: {evaluate.samples: 2}\n")
    _, base = load_sweep(path, set=["seed=5"])
    recipe = base.at({"stages.0.quantize.bits": 3})
    assert (recipe.stages[0].config.bits, recipe.evaluate.samples, recipe.seed) == (3, 2, 5)
    with pytest.raises(RequestError) as raised:
        base.at({"stages.0.quantize.bits": "three"})
    assert f"{path}:4: stages.0.quantize.bits: expected a number" in str(raised.value)
    again = type(base).from_plain(base.to_plain()).at({"stages.0.quantize.bits": 3})
    assert again.resolved() == recipe.resolved()


def test_speed_is_measured_where_an_objective_needs_it(file):
    assert load_sweep(file(GOOD))[0].speed is None
    assert load_sweep(file(GOOD + "objectives: [perplexity, decode_speed]\n"))[0].speed.prompt_tokens == 128
    assert load_sweep(file(GOOD + "speed: {prompt_tokens: 16}\n"))[0].speed.prompt_tokens == 16


@pytest.mark.parametrize("name", sorted(bundled_sweeps()))
def test_a_bundled_sweep_is_complete(name):
    sweep, base = load_sweep(name)
    assert sweep.file.name == name
    assert sweep.file.description
    assert sweep.file.output == f"out/sweeps/{name}"
    first = {key: values.grid()[0] for key, values in sweep.vary.items()}
    assert base.at(first).evaluate is not None
    assert load(sweep.file.recipe).model == "checkpoints/stdlib-4m"
    assert bundled_sweeps()[name].read_text(encoding="utf-8").startswith("# "), "the file says first what it is for"


@pytest.mark.parametrize(
    ("key", "calibration", "evaluate", "refused"),
    [
        ("calibration.data", "bundled", "{}", True),
        ("calibration.packing", "mine.txt", "{}", True),
        ("calibration.packing", "bundled", "{}", False),
        ("calibration.samples", "mine.txt", "{}", False),
        ("calibration.data", "mine.txt", "{data: bundled}", False),
    ],
)
def test_trials_are_evaluated_on_one_text(file, key, calibration, evaluate, refused):
    file(
        f"name: t\nmodel: m\nstages: [quantize: {{method: rtn}}]\ncalibration: {{data: {calibration}}}\nevaluate: {evaluate}\n",
        "own.yaml",
    )
    path = file(f"name: mine\nrecipe: own.yaml\nvary:\n  {key}: [1, 2]\n", "sweep.yaml")
    if not refused:
        load_sweep(path)
        return
    with pytest.raises(RequestError, match=rf"sweep\.yaml:4: vary\.{key}: .* changes the held-out evaluation text"):
        load_sweep(path)


@pytest.mark.parametrize("name", ["llama_bits", "llama_formats"])
def test_every_point_of_a_bundled_grid_fits_the_bundled_model(name):
    sweep, base = load_sweep(name)
    recipe, refused = first_recipe(sweep, base, Grid(sweep), "cpu", quiet=True)
    assert recipe.stages
    assert not refused
