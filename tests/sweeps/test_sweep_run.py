"""Whole sweeps over a tiny model: what is run, recorded, kept and told; with the trials in this process."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from sweep_runs import BITS, GROUP, Here

from compress.sweeps import pareto_front
from compress.sweeps import run as speeds
from compress.sweeps.directory import SweepDirectory
from compress.sweeps.metrics import METRICS
from compress.sweeps.run import AllFailedError
from runtime.errors import CompressError, RequestError
from runtime.system.lock import inside, locked


def records(path):
    return {file.stem: json.loads(file.read_text()) for file in sorted((path / "trials").glob("*.json"))}


def artifacts(path):
    return [entry.name for entry in sorted((path / "trials").iterdir()) if entry.is_dir()]


# ------------------------------------------------------------------ a grid
def test_a_grid(run, settings, tmp_path):
    done = run(settings(keep="pareto"))
    assert [trial["values"] for trial in done.trials] == [
        {BITS: bits, GROUP: group} for bits in (3, 8) for group in (16, 32)
    ]
    assert all(trial["status"] == "finished" for trial in done.trials)
    sizes = [trial["metrics"]["size"] for trial in done.trials]
    assert sizes[1] < sizes[0] < sizes[3] < sizes[2], "fewer bits and larger groups are smaller"
    points = [(trial["metrics"]["perplexity"], trial["metrics"]["size"]) for trial in done.trials]
    assert done.summary["pareto"] == pareto_front(points, ["min", "min"])
    best = min(range(4), key=lambda number: points[number])
    assert done.summary["best"] == best
    assert done.summary["source"]["size"] > max(sizes)
    assert artifacts(tmp_path / "out") == [f"{number:04d}" for number in done.summary["pareto"]]
    for trial in done.trials:
        assert (trial["artifact"] is not None) == trial["pareto"]
        if trial["artifact"]:
            manifest = json.loads((tmp_path / "out" / trial["artifact"] / "compress.json").read_text())
            assert manifest["metrics"]["after"]["perplexity"] == trial["metrics"]["perplexity"]
            assert manifest["bytes"]["after"] == trial["metrics"]["size"]


def test_what_is_written(run, settings, tmp_path, views):
    done = run(settings(vary={BITS: [3, 8]}))
    out = tmp_path / "out"
    assert json.loads((out / "sweep.json").read_text()) == done.summary
    table = list(csv.DictReader((out / "table.csv").open()))
    assert [row["trial"] for row in table] == ["0", "1"]
    assert [float(row["perplexity"]) for row in table] == [trial["metrics"]["perplexity"] for trial in done.trials]
    assert [row[BITS] for row in table] == ["3", "8"]
    picture = (out / "pareto.svg").read_text()
    assert ET.fromstring(picture).tag.endswith("svg")
    for text in (
        "size of all that is loaded (MB)",
        "perplexity on held-out text",
        "on the Pareto front",
        "the original model",
        "labels: bits",
    ):
        assert text in picture
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert "<svg" in page
    assert all(METRICS["perplexity"].show(trial["metrics"]["perplexity"]) in page for trial in done.trials)
    assert yaml.safe_load((out / "sweep.yaml").read_text())["vary"][BITS] == {"choices": [3, 8]}
    assert artifacts(out) == []


@pytest.mark.parametrize(("keep", "count"), [("all", 2), ("best", 1)])
def test_artifacts_that_are_kept(run, settings, tmp_path, keep, count):
    done = run(settings(vary={BITS: [3, 8]}, keep=keep))
    assert len(artifacts(tmp_path / "out")) == count
    if keep == "best":
        assert artifacts(tmp_path / "out") == [f"{done.summary['best']:04d}"]


def test_a_point_that_the_recipe_refuses_is_found_before_anything_runs(run, settings, tmp_path):
    executor = Here()
    with pytest.raises(RequestError) as raised:
        run(settings(vary={BITS: [98, 99]}), executor)
    assert f"{BITS}: expected a number between" in str(raised.value)
    assert f"(in the trial with {BITS}=98)" in str(raised.value)
    assert f"(in the trial with {BITS}=99)" in str(raised.value)
    with pytest.raises(RequestError, match="'group_size'"):
        run(settings(vary={"stages.0.quantize.grup_size": [32]}), executor)
    with pytest.raises(RequestError, match="'group_size'"):  # before a model is looked for, which may be a download
        run(settings(vary={"stages.0.quantize.grup_size": [32]}, model="no/such-model"), executor)
    assert not executor.started
    assert not (tmp_path / "out").exists()


def test_points_with_a_record_are_not_checked_again(run, settings, monkeypatch):
    from compress.run.session import Session

    checked = []
    real = Session.open

    def session_open(recipe, device="auto"):
        checked.append(recipe.stages[0].config.bits)
        return real(recipe, device)

    run(settings(vary={BITS: [3, 4]}))
    with monkeypatch.context() as looking:
        looking.setattr(Session, "open", session_open)
        with pytest.raises(KeyboardInterrupt):
            run(settings(vary={BITS: [3, 4, 8]}), interrupt_at(2), resume=True)
    assert checked[:3] == [3, 8, 3], "the first, the one that is new, and the first again for what it reads"


def test_a_point_that_the_model_refuses_is_found_before_anything_runs(run, settings, tmp_path):
    executor = Here()
    with pytest.raises(RequestError, match="nothing_called_so"):
        run(settings(vary={"stages.0.quantize.targets": [["nothing_called_so"]]}), executor)
    assert not executor.started
    assert not (tmp_path / "out").exists()


def test_points_that_do_not_fit_are_skipped_and_said(run, settings, tmp_path, capsys):
    targets = "stages.0.quantize.targets"
    executor = Here()
    chosen = settings(vary={targets: [["nothing_called_so"], ["Linear"]], BITS: [99, 8]})
    done = run(chosen, executor)
    assert executor.started == [3], "what does not fit is not begun"
    assert done.summary["counts"] == {"finished": 1, "failed": 0, "refused": 3, "proposed": 0}
    assert [trial["status"] for trial in done.trials] == ["refused", "refused", "refused", "finished"]
    assert "nothing_called_so" in done.trials[1]["error"]
    assert "expected a number between" in done.trials[2]["error"]
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"][1]["error"] == done.trials[1]["error"]
    assert "refused: " in (tmp_path / "out" / "table.csv").read_text()
    err = " ".join(capsys.readouterr().err.split())
    assert "3 of 4 combinations do not fit" in err
    again = run(settings(vary={targets: [["nothing_called_so"], ["Linear"]], BITS: [99, 8, 4]}), executor, resume=True)
    assert executor.started == [3, 5], "what is on record is not tried again"
    assert again.summary["counts"]["refused"] == 4


def test_limits_and_constraints_keep_a_trial_off_the_front(run, settings, recipe_file):
    data = yaml.safe_load(recipe_file.read_text())
    data["evaluate"]["max_perplexity_increase"] = 1e-9
    recipe_file.write_text(yaml.safe_dump(data))
    done = run(settings(vary={BITS: [3, 8]}, constraints={"size": {"max": "100 B"}}))
    assert done.summary["counts"]["finished"] == 2
    for trial in done.trials:
        assert any(sentence.startswith("size is") for sentence in trial["broken"])
    worst = max(done.trials, key=lambda trial: trial["metrics"]["perplexity_increase"])
    assert any(sentence.startswith("max_perplexity_increase is") for sentence in worst["broken"])
    assert (done.summary["pareto"], done.summary["best"]) == ([], None)


# ------------------------------------------------------------------ what fails
@pytest.mark.slow
def test_a_trial_that_fails_does_not_end_the_sweep(run, settings, monkeypatch, capsys):
    from compress.run import run as pipeline

    real = pipeline.apply

    def apply(recipe, **options):
        if recipe.stages[0].config.bits == 3:
            raise CompressError("the Hessian of layer 1 is singular")
        if recipe.stages[0].config.group_size == 16:
            raise KeyError("a bug")
        return real(recipe, **options)

    monkeypatch.setattr(pipeline, "apply", apply)
    done = run(settings())
    assert [trial["status"] for trial in done.trials] == ["failed", "failed", "failed", "finished"]
    assert done.trials[0]["error"] == "the Hessian of layer 1 is singular"
    assert "unexpected KeyError: 'a bug'" in done.trials[2]["error"]
    assert "in apply" in Path(done.trials[2]["error"].split("; ")[1].removesuffix(" shows where")).read_text()
    assert done.summary["pareto"] == [3]
    assert "singular" in capsys.readouterr().err
    executor = Here()
    monkeypatch.setattr(pipeline, "apply", real)
    assert run(settings(), executor, resume=True).summary["counts"]["failed"] == 3
    assert executor.started == [], "what has failed is done"
    again = run(settings(), executor, resume=True, retry=True)
    assert executor.started == [0, 1, 2]
    assert again.summary["counts"]["finished"] == 4


def test_what_finds_no_room_has_failed_and_is_not_refused(run, settings, monkeypatch, tmp_path):
    chosen = settings(vary={BITS: [8]})
    with monkeypatch.context() as full:
        full.setattr(psutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(AllFailedError, match="disk") as raised:
            run(chosen)
    assert raised.value.result.trials[0]["status"] == "failed"

    def before(number):
        held.enter_context(locked(inside(tmp_path / "out" / "trials" / "0000"), tmp_path))

    (tmp_path / "out" / "trials" / "0000").mkdir(exist_ok=True)
    with ExitStack() as held, pytest.raises(AllFailedError, match="0000") as raised:
        run(chosen, Here(before=before), resume=True, retry=True)
    assert raised.value.result.trials[0]["status"] == "failed"
    assert run(chosen, resume=True, retry=True).trials[0]["status"] == "finished"


def test_all_have_failed(run, settings, monkeypatch, views):
    from compress.run import run as pipeline

    def apply(recipe, **options):
        raise MemoryError

    monkeypatch.setattr(pipeline, "apply", apply)
    with pytest.raises(AllFailedError, match="out of memory") as raised:
        run(settings())
    assert raised.value.exit_code == 1
    assert raised.value.result.summary["counts"]["failed"] == 4
    assert not (raised.value.result.path / "pareto.svg").exists(), "there is nothing to draw"
    assert (raised.value.result.path / "report.html").is_file()


# ------------------------------------------------------------------ going on
def interrupt_at(number):
    def before(now):
        if now == number:
            raise KeyboardInterrupt

    return Here(before=before)


@pytest.mark.slow
def test_a_resume_runs_what_is_missing(run, settings, tmp_path):
    chosen = settings(vary={BITS: [3, 4, 8]})
    with pytest.raises(KeyboardInterrupt):
        run(chosen, interrupt_at(1))
    before = records(tmp_path / "out")
    assert [record["status"] for record in before.values()] == ["finished", "proposed"]
    with pytest.raises(RequestError, match="--resume"):
        run(chosen)
    executor = Here()
    done = run(chosen, executor, resume=True)
    assert executor.started == [1, 2]
    assert records(tmp_path / "out")["0000"] == before["0000"]
    whole = run(chosen, overwrite=True)
    assert [trial["metrics"] for trial in whole.trials] == [trial["metrics"] for trial in done.trials]


def test_a_trial_whose_record_is_damaged_is_run_again(run, settings, tmp_path, capsys):
    chosen = settings(vary={BITS: [3, 4, 8]}, keep="all")
    whole = run(chosen)
    trials = tmp_path / "out" / "trials"
    (trials / "0000.json").write_text((trials / "0000.json").read_text()[:100])
    (trials / "0001.json").write_text((trials / "0001.json").read_text().replace('"metrics"', '"metrucs"'))
    made = (trials / "0001" / "compress.json").stat().st_mtime_ns
    executor = Here()
    done = run(chosen, executor, resume=True)
    assert executor.started == [0, 1]
    assert capsys.readouterr().err.count("is damaged") == 2
    assert [(trial["values"], trial["metrics"]) for trial in done.trials] == [
        (trial["values"], trial["metrics"]) for trial in whole.trials
    ]
    assert (trials / "0001" / "compress.json").stat().st_mtime_ns == made, "what is finished is not made again"


def test_a_sweep_that_began_meanwhile_is_not_adopted(run, settings, monkeypatch, tmp_path):
    real = SweepDirectory.take_lock

    def take_lock(self):
        monkeypatch.setattr(SweepDirectory, "take_lock", real)
        run(settings(vary={BITS: [3]}))
        real(self)

    monkeypatch.setattr(SweepDirectory, "take_lock", take_lock)
    with pytest.raises(RequestError, match="--resume"):
        run(settings(vary={BITS: [8]}))
    assert [record["values"] for record in records(tmp_path / "out").values()] == [{BITS: 3}]
    assert len(run(settings(vary={BITS: [3]}), resume=True).trials) == 1, "and it is not locked any more"


@pytest.mark.slow
def test_values_can_be_added_and_nothing_else(run, settings, tmp_path, recipe_file):
    run(settings(vary={BITS: [4, 8]}))
    executor = Here()
    done = run(settings(vary={BITS: [3, 4, 8]}, description="more"), executor, resume=True)
    assert executor.started == [2]
    assert [trial["values"][BITS] for trial in done.trials] == [4, 8, 3]
    for changed, said in (
        ({"vary": {BITS: [3, 4]}}, BITS),
        ({"vary": {GROUP: [16]}}, BITS),
        ({"vary": {BITS: [3, 4, 8], GROUP: [16]}}, GROUP),
        ({"vary": {BITS: [3, 4, 8]}, "objectives": ["kl", "size"]}, "'objectives'"),
        ({"vary": {BITS: [3, 4, 8]}, "keep": "all"}, '\'keep\' was "none" and is "all"'),
        ({"vary": {BITS: [3, 4, 8]}, "set": {"seed": 3}}, "the recipe has changed since"),
    ):
        with pytest.raises(RequestError, match=said):
            run(settings(**changed), resume=True)
    text = Path(yaml.safe_load(recipe_file.read_text())["evaluate"]["data"])
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[5000:])
    changed = {"vary": {BITS: [3, 4, 8]}, "set": {"evaluate.data": str(other)}}
    with pytest.raises(RequestError, match=r"recipe|evaluation text"):
        run(settings(**changed), resume=True)
    assert len(records(tmp_path / "out")) == 3


def test_another_model_is_refused(run, settings, tiny_llama):
    run(settings(vary={BITS: [4]}))
    with pytest.raises(RequestError, match=r"recipe|source fingerprint"):
        run(settings(vary={BITS: [4]}), resume=True, model=tiny_llama(seed=1))


def test_a_foreign_directory_is_left_alone(run, settings, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(RequestError, match=r"thesis\.tex"):
            run(settings(), **options)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years of work"


# ------------------------------------------------------------------ speed
@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_speed_is_measured_with_nothing_beside_it(run, settings, tmp_path, monkeypatch, views):
    executor = Here(slots=3)
    measured = []

    def measure(model, config, device):
        assert not executor._jobs, "a trial runs while speed is measured"
        assert (Path(model) / "config.json").is_file()
        measured.append(Path(model).name)
        if Path(model).name == "0001":
            raise CompressError("it is no use")
        return {"decode_speed": 100.0 + len(measured), "prefill_speed": 5.0, "memory": 1e6}

    monkeypatch.setattr(speeds, "measure", measure)
    chosen = settings(objectives=["perplexity", "size", "decode_speed"], speed={"prompt_tokens": 16}, jobs=3)
    done = run(chosen, executor)
    assert measured[:4] == ["0000", "0001", "0002", "0003"]
    assert len(measured) == 5, "and the model itself"
    assert executor.most == 3
    assert done.summary["source"]["decode_speed"] == 105
    assert [trial["metrics"].get("decode_speed") for trial in done.trials] == [101, None, 103, 104]
    assert done.trials[1]["speed_error"] == "it is no use"
    assert 1 not in done.summary["pareto"]
    assert 3 in done.summary["pareto"], "nothing is as fast"
    assert artifacts(tmp_path / "out") == []
    assert "decoding (tokens/s)" in (tmp_path / "out" / "pareto.svg").read_text()
    run(chosen, executor, resume=True)
    assert len(measured) == 5


def test_why_the_speed_of_the_source_is_missing(run, settings, monkeypatch, capsys):
    measured = []

    def measure(model, config, device):
        measured.append(Path(model).name)
        if measured[-1] != "0000":
            raise CompressError("it needs 80 GB")
        return {"decode_speed": 100.0}

    monkeypatch.setattr(speeds, "measure", measure)
    chosen = settings(vary={BITS: [8]}, speed={"prompt_tokens": 16})
    done = run(chosen)
    assert "decode_speed" not in done.summary["source"]
    assert "it needs 80 GB" in capsys.readouterr().err
    run(chosen, resume=True)
    assert len(measured) == 2, "it is not tried anew"
    run(chosen, resume=True, retry=True)
    assert len(measured) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_the_speed_of_a_tiny_model(run, settings, monkeypatch):
    monkeypatch.setattr(speeds, "of_source", lambda *_: {"decode_speed": 1.0})
    done = run(settings(vary={BITS: [4]}, speed={"prompt_tokens": 8, "new_tokens": 4, "repeat": 1, "threads": 1}))
    metrics = done.trials[0]["metrics"]
    assert metrics["decode_speed"] > 0
    assert metrics["prefill_speed"] > 0
    assert metrics["memory"] > 1e6


# ------------------------------------------------------------------ a search
def search(**keys):
    return {"sampler": "tpe", "trials": 4, "startup": 2, "seed": 1, **keys}


def values_of(done):
    return [trial["values"] for trial in done.trials]


@pytest.mark.slow
def test_a_search_that_was_interrupted_ends_as_one_that_was_not(run, settings, tmp_path):
    chosen = settings(vary={BITS: {"low": 2, "high": 8}, GROUP: [16, 32]}, search=search())
    whole = run(chosen)
    assert len({json.dumps(values) for values in values_of(whole)}) == 4, "no values are tried twice"
    with pytest.raises(KeyboardInterrupt):
        run(chosen, interrupt_at(2), overwrite=True)
    executor = Here()
    assert values_of(run(chosen, executor, resume=True)) == values_of(whole)
    assert executor.started == [2, 3]
    longer = settings(vary={BITS: {"low": 2, "high": 8}, GROUP: [16, 32]}, search=search(trials=5))
    more = run(longer, executor, resume=True)
    assert executor.started == [2, 3, 4]
    assert values_of(more)[:4] == values_of(whole)
    with pytest.raises(RequestError, match=r"search\.trials"):
        run(chosen, executor, resume=True)


def test_a_search_records_what_the_recipe_refuses(run, settings):
    executor = Here()
    done = run(settings(vary={BITS: [4, 99]}, search=search(trials=6)), executor)
    assert len(done.trials) == 2, "there are no more values"
    refused = next(trial for trial in done.trials if trial["values"][BITS] == 99)
    assert refused["status"] == "refused"
    assert "expected a number between" in refused["error"]
    assert refused["number"] not in executor.started
    assert done.summary["counts"]["finished"] == 1


def test_a_search_of_nothing_that_can_be_is_refused_at_once(run, settings, tmp_path):
    with pytest.raises(RequestError, match="'group_size'"):
        run(settings(vary={"stages.0.quantize.grup_size": [16, 32]}, search=search()))
    assert not (tmp_path / "out").exists()


def test_ranges_of_very_many_integers(run, settings):
    many = settings(vary={"seed": {"low": 1, "high": 10**9}, BITS: [3, 8]})
    with pytest.raises(RequestError, match="2,000,000,000"):
        run(many)
    done = run({**many, "search": search(trials=1)})
    assert 1 <= done.trials[0]["values"]["seed"] <= 10**9


def test_ranges_without_steps_are_for_searches(run, settings):
    vary = {"stages.0": {"low": 0.1, "high": 0.5}}
    with pytest.raises(RequestError, match=r"vary\.stages\.0: "):
        run(settings(vary=vary))
