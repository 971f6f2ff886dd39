"""`--report-to`: what trackers receive of applies, trainings, drafts and sweeps; their libraries are stood in for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from random_models import UNLIMITED

import compress
from compress.cli import main
from compress.core.tracking import Tracking, check_tracker, tracked
from runtime.errors import RequestError

RTN = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}


class Library(ModuleType):
    """Stands for wandb, trackio and mlflow: it keeps what it is told."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # others ask whether it is there
        self.begun: list[tuple[str, str]] = []
        self.config: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[str] = []

    # wandb and trackio
    def init(self, project: str, name: str, config: dict[str, Any]) -> Library:
        self.begun.append((project, name))
        self.config = config
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended.append("finished")

    # mlflow
    def set_experiment(self, name: str) -> None:
        self.project = name

    def start_run(self, run_name: str) -> None:
        self.begun.append((self.project, run_name))

    def log_params(self, values: dict[str, Any]) -> None:
        assert len(values) <= 100
        self.config |= values

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.log(values, step)

    def end_run(self, status: str) -> None:
        self.ended.append(status)

    def series(self, name: str) -> list[float]:
        return [values[name] for _, values in self.logged if name in values]


@pytest.fixture(params=["wandb", "mlflow", "trackio"])
def library(request: Any, monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library(request.param)
    monkeypatch.setitem(sys.modules, request.param, found)
    return found


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library("wandb")
    monkeypatch.setitem(sys.modules, "wandb", found)
    return found


def test_numbers_arrive_in_growing_steps(library: Library) -> None:
    config = {
        "name": "x",
        "stages": [{"quantize": {"bits": 4}}],
        "many": {str(number): number for number in range(250)},
    }
    with tracked(Tracking(library.__name__, "x", config, pytest.fail)) as tracking:
        tracking.log({"training": {"step": 4, "loss": 2.5}, "text": "no number", "good": True})
        tracking.log({"nothing": None})
        tracking.log({"perplexity": float("inf"), "kl": 0.1})
    assert library.begun == [("compress", "x")]
    assert library.logged == [(0, {"training/step": 4, "training/loss": 2.5}), (1, {"kl": 0.1})]
    assert library.config == config or library.config["stages.0.quantize.bits"] == 4
    assert library.ended in (["finished"], ["FINISHED"])


def test_a_run_that_fails_is_ended(library: Library) -> None:
    with pytest.raises(KeyboardInterrupt), tracked(Tracking(library.__name__, "x", {}, pytest.fail)):
        raise KeyboardInterrupt
    assert library.ended in (["finished"], ["FAILED"])


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_costs_no_run(wandb: Library, broken: str) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("the server is gone\nand more")

    setattr(wandb, broken, fail)
    warnings: list[str] = []
    with tracked(Tracking("wandb", "x", {}, warnings.append)) as tracking:
        tracking.log({"a": 1})
        tracking.log({"a": 2})
    assert warnings == ["logging to wandb stopped: ConnectionError: the server is gone"]


def test_what_is_no_tracker_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        RequestError, match=r"no tracker 'wandbb'; did you mean 'wandb'\?; allowed: wandb, mlflow, trackio"
    ):
        check_tracker("wandbb")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for command in (["apply", "llama_w4"], ["sweep", "llama_bits"], ["draft", "nothing", "llama_w4_draft"]):
        assert main([*command, "--report-to", "mlflow"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("compress: --report-to mlflow: not installed; run: pip install mlflow"), said


def test_an_apply_reports_layers_quality_and_sizes(
    wandb: Library, make_checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path
) -> None:
    asked = recipe(
        make_checkpoint(), RTN, evaluate={"data": str(text), "sequence_length": 32, "samples": 4, **UNLIMITED}
    )
    made = compress.apply(asked, output=tmp_path / "out", quiet=True, report_to="wandb")
    assert wandb.begun == [("compress", "test")]
    assert wandb.config["stages"][0]["quantize"]["bits"] == 4
    assert wandb.series("block") == [0, 1, 2]
    errors = {layer["name"]: layer["error"] for layer in made.manifest["layers"]}
    assert wandb.series("layer_error/self_attn.q_proj")[0] == errors["model.layers.0.self_attn.q_proj"]
    assert wandb.series("after/perplexity") == [made.metrics["after"]["perplexity"]]
    assert wandb.series("bytes/after") == [made.manifest["bytes"]["after"]]
    assert [step for step, _ in wandb.logged] == [0, 1, 2, 3]
    assert wandb.ended == ["finished"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_recovery_reports_its_loss_and_a_sweep_its_trials(
    wandb: Library, make_checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path
) -> None:
    recover = {"recover": {"method": "finetune", "steps": 4, "batch_size": 2, "samples": 16, "sequence_length": 32}}
    asked = recipe(
        make_checkpoint(), {"structure": {"method": "magnitude", "remove": "ffn", "ratio": 0.25}}, recover, RTN
    )
    compress.apply(asked, output=tmp_path / "out", quiet=True, report_to="wandb")
    assert wandb.series("training/step")
    assert len(wandb.series("training/loss")) == len(wandb.series("training/step"))
    wandb.logged.clear()
    evaluate = {"data": str(text), "sequence_length": 32, "samples": 4, **UNLIMITED}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(tmp_path / "model", RTN, evaluate=evaluate)))
    sweep = {
        "name": "s",
        "recipe": str(file),
        "vary": {"stages.0.quantize.bits": [4, 8]},
    }
    done = compress.sweep(sweep, output=tmp_path / "sweep", quiet=True, report_to="wandb")
    assert sorted(wandb.series("values/stages.0.quantize.bits")) == [4, 8]
    assert len(done.trials) == len(wandb.logged) == 2
    assert wandb.begun[-1] == ("compress", "s")
