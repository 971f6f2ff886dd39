"""`compress sweep` and `compress.sweep`: what they print, and with which code they end."""

from __future__ import annotations

import json

import pytest
import yaml
from sweep_runs import BITS, Here

import compress
from compress.cli import main
from runtime.errors import CompressError


@pytest.fixture
def file(settings, tmp_path, monkeypatch):
    """A sweep of two trials in a file; its trials run here."""
    monkeypatch.setattr("compress.sweeps.executors.processes.ProcessExecutor", lambda jobs, *_: Here(jobs))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(settings(vary={BITS: [3, 8]}, constraints={"perplexity_increase": {"max": "400%"}})))
    return path


def call(capsys, *arguments):
    code = main(["sweep", *map(str, arguments), "--device", "cpu"])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table(file, capsys, tmp_path):
    code, out, err = call(capsys, file, "--output", tmp_path / "out")
    assert code == 0
    words = " ".join(out.split())
    for text in (
        "trial bits perplexity size kl front",
        "source",
        "2 finished",
        "0 artifacts kept (keep: none)",
        "table.csv",
    ):
        assert text in words
    assert "[2/2] trial 1: bits=8: perplexity" in err
    code, out, err = call(capsys, file, "--output", tmp_path / "out", "--quiet", "--overwrite")
    assert code == 0
    assert "trial" not in err, "warnings alone: the random model reads no text"


def test_json_is_one_object(file, capsys, tmp_path):
    code, out, _ = call(capsys, file, "--output", tmp_path / "out", "--json")
    assert code == 0
    result = json.loads(out)
    assert result["counts"] == {"finished": 2, "failed": 0, "refused": 0, "proposed": 0}
    assert result["objectives"][0] == {"name": "perplexity", "better": "min", "label": "perplexity on held-out text"}
    assert {"number", "values", "status", "error", "metrics", "pareto", "broken", "artifact"} <= set(
        result["trials"][0]
    )
    assert result["keys"] == {BITS: "bits"}


def test_wrong_requests_end_with_2(file, capsys, tmp_path):
    call(capsys, file, "--output", tmp_path / "out", "--quiet")
    for options, said in (
        ([file, "--output", tmp_path / "out"], "--resume"),
        ([file, "--set", "stages.0.quantize.bitts=3"], "did you mean 'bits'?"),
        ([file, "--model", tmp_path / "nothing"], "nothing"),
        ([file, "--jobs", "0"], "--jobs"),
        ([file, "--max-memory", "lots"], "--max-memory"),
        (["llama_bit"], "did you mean 'llama_bits'?"),
    ):
        code, out, err = call(capsys, *options)
        assert (code, out) == (2, "")
        assert said in err
        assert "Traceback" not in err


def test_all_trials_that_fail_end_with_1(file, capsys, tmp_path, monkeypatch):
    def apply(recipe, **options):
        raise CompressError("no luck")

    monkeypatch.setattr("compress.run.run.apply", apply)
    code, out, err = call(capsys, file, "--output", tmp_path / "out", "--json")
    assert code == 1
    result = json.loads(out)
    assert result["error"] == "none of 2 trials has finished; trial 0: no luck"
    assert result["exit_code"] == 1
    assert [trial["error"] for trial in result["trials"]] == ["no luck", "no luck"]
    assert "none of 2 trials has finished" in err


def test_from_python(file, tmp_path):
    done = compress.sweep(file, output=tmp_path / "out", set=["evaluate.samples=2"], device="cpu", quiet=True)
    assert done.path == tmp_path / "out"
    assert [trial["values"] for trial in done.trials] == [{BITS: 3}, {BITS: 8}]
    assert done.summary["sweep"]["name"] == "tiny"
