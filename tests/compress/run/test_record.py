"""The run record (`run.json`): what it says of a run, of its samples, and how the artifact stays the same without it."""

from __future__ import annotations

import json
from datetime import datetime
from html import escape

import pytest
from random_models import UNLIMITED
from runs import STAGES, TIMED, contents, make_request

import compress
import runtime
from compress.cli import main
from compress.core.run_directory import recorded_samples
from compress.core.units import decoding_speed
from compress.run import record
from compress.run.record import machine, make_samples, shown_command
from runtime.errors import ArtifactError, RequestError


@pytest.fixture
def request_file(tmp_path):
    request = make_request(tmp_path, "compress") | {"sample": "line 3: the"}
    request["evaluate"] = {**UNLIMITED, "data": request["calibration"]["data"], "sequence_length": 16, "samples": 7}
    file = tmp_path / "r.json"
    file.write_text(json.dumps(request))
    return file


def test_a_command_notes_what_a_reader_asks(request_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["apply", str(request_file), "-o", str(out), "-q", "--device", "cpu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    noted = json.loads((out / "run.json").read_text())
    (run,) = noted["runs"]
    assert run["command"] == f"compress apply {request_file} -o {out} -q --device cpu --json"
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(run["date"])).total_seconds()) < 600
    assert run["seconds"] == answer["seconds"]
    assert list(run["seconds"])[:2] == ["prepare", "compress"]
    assert run["peak_memory"] == answer["peak_memory"]
    assert run["machine"] == machine("cpu")
    assert run["machine"]["cpu"]
    samples = noted["samples"]
    assert samples == answer["samples"]
    assert samples["prompts"] == ["line 3: the"]
    assert len(samples["source"]) == len(samples["artifact"]) == 1
    assert answer["sample"] == {"prompt": "line 3: the", "text": samples["artifact"][0], "engine": samples["engine"]}
    (speed,) = samples["speed"]
    assert (speed["how"], speed["tokens"], f"cpu: {speed['engine']}") == ("", 48, samples["engine"])
    assert speed["tokens_per_second"] > 0
    page = (out / "report.html").read_text()
    assert "Sample outputs" in page
    assert decoding_speed([speed]) in page
    assert str(request_file) in page
    # Nothing is done again, and the samples are still told.
    assert main(["apply", str(request_file), "-o", str(out), "-q", "--device", "cpu", "--json", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == samples
    assert json.loads((out / "run.json").read_text()) == noted


def test_equal_runs_are_equal_artifacts_and_equal_records_equal_reports(request_file, tmp_path):
    made = [compress.apply(request_file, output=tmp_path / name, quiet=True, device="cpu").path for name in "ab"]
    one, other = map(contents, made)
    assert one == other
    assert not set(TIMED) & json.loads((made[0] / "compress.json").read_text())["files"].keys()
    (made[1] / "run.json").write_bytes((made[0] / "run.json").read_bytes())
    from compress.report import write_report

    assert write_report(made[1]).read_bytes() == write_report(made[0]).read_bytes()
    assert json.loads((made[0] / "run.json").read_text())["runs"][0]["command"] is None


@pytest.mark.parametrize("damaged", [False, True])
def test_a_resumed_run_is_noted_after_the_first(request_file, tmp_path, monkeypatch, damaged):
    from compress.run import run

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(run, "write_metadata", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compress.apply(request_file, output=out, quiet=True, device="cpu")
    (first,) = json.loads((out / "run.json").read_text())["runs"]
    assert list(first["seconds"]) == ["prepare", "compress"]
    if damaged:
        (out / "run.json").write_text("{")
    compress.apply(request_file, output=out, quiet=True, device="cpu", resume=True)
    runs = json.loads((out / "run.json").read_text())["runs"]
    assert runs[:-1] == ([] if damaged else [first])
    assert "load back" in runs[-1]["seconds"]


def test_without_a_prompt_held_out_text_is_continued(request_file, tmp_path):
    request = json.loads(request_file.read_text())
    del request["sample"]
    made = compress.apply(request, output=tmp_path / "out", quiet=True, device="cpu")
    assert len(made.prompts) == 3
    assert made.prompts[0].startswith("line 0")
    assert made.samples is None


@pytest.mark.parametrize(
    ("stages", "hows"),
    [
        ([{"kv_cache": {"keys": "int8", "values": "int8"}}], ["with its compressed cache", "with a plain cache"]),
        (STAGES["draft"], ["with its draft", "without the draft"]),
    ],
)
def test_the_speed_is_given_without_what_an_artifact_brings_too(request_file, tmp_path, monkeypatch, stages, hows):
    request = json.loads(request_file.read_text()) | {"stages": stages}
    made = compress.apply(request, output=tmp_path / "out", quiet=True, device="cpu")
    speed = make_samples(made.path, tmp_path / "model", ["line 3"], "cpu", None, note=True)["speed"]
    assert [one["how"] for one in speed] == hows
    told = decoding_speed(recorded_samples(made.path)["speed"])
    assert f"tokens/s {hows[0]}, " in told
    assert f"{hows[1]} (48 tokens, on the machine that made it; a rough figure" in told
    assert escape(told) in (made.path / "report.html").read_text()
    monkeypatch.setattr(record, "_PATIENCE", 0)  # loading it again would take long
    alone = make_samples(made.path, tmp_path / "model", ["line 3"], "cpu", None, note=False)["speed"]
    assert [one["how"] for one in alone] == hows[:1]


def test_no_speed_is_given_of_what_cannot_run(request_file, tmp_path, monkeypatch):
    made = compress.apply(request_file, output=tmp_path / "out", quiet=True, device="cpu")

    def load(*_, **__):
        raise RequestError("not on this machine")

    monkeypatch.setattr(runtime, "load", load)
    samples = make_samples(made.path, tmp_path / "model", ["line 3"], "cpu", None, note=True)
    assert samples["left_out"] == dict.fromkeys(("source", "artifact"), "not on this machine")
    assert (samples["engine"], samples["speed"]) == (None, [])
    assert decoding_speed(samples["speed"]) == ""
    assert "Decodes" not in (made.path / "report.html").read_text()


def test_a_source_that_does_not_fit_is_left_out_with_the_reason(request_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "available_bytes", lambda device: 10)
    assert main(["apply", str(request_file), "-o", str(tmp_path / "out"), "-q", "--device", "cpu", "--json"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    assert samples["source"] is None
    assert "10 B is free" in samples["left_out"]["source"]
    assert samples["artifact"] is not None
    assert samples["left_out"]["source"] in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize("samples", [{}, [], {"prompts": []}, 5])
def test_samples_of_another_form(tmp_path, samples):
    (tmp_path / "run.json").write_text(json.dumps({"samples": samples}))
    with pytest.raises(ArtifactError, match=r"run\.json has samples that no version of this tool writes"):
        recorded_samples(tmp_path)


def test_no_secret_is_noted():
    line = [
        "apply",
        "r",
        "--set",
        "a.token=abcd",
        "-m",
        "https://me:pass@host/x",
        "hf_ABCDEFGHIJKLMN",
        "--set",
        "calibration.tokens=64",
    ]
    shown = shown_command(line)
    for secret in ("abcd", "me:pass", "ABCDEFGH"):
        assert secret not in shown
    assert "calibration.tokens=64" in shown
    assert "'a b'" in shown_command(["a b"])
