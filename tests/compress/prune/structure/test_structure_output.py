"""What is told of passes that removed channels, heads, layers or experts: report.html, `plan`, `apply`, `inspect`."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from compress.cli import main
from compress.model.stage import row_of
from compress.prune.structure.stage import STAGE
from runtime.checkpoint.checkpoint import Checkpoint

CUT = {
    "method": "obs",
    "before": 96,
    "after": 64,
    "unit": "channels",
    "parameters_before": 200_000,
    "parameters_after": 150_000,
}


def page(*passes: dict[str, Any]) -> str:
    facts: Any = SimpleNamespace(manifest={"passes": list(passes)})
    return STAGE.report(facts.manifest)


def rows(html: str) -> list[list[str]]:
    """The cells of every row of all tables."""
    return [
        [unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", html)
    ]


def layer(name: str, error: float | None, **more: Any) -> dict[str, Any]:
    return {"name": name, "units": 96, "kept": 64, "error": error, "damping": 0.01, **more}


def test_nothing_removed_nothing_said() -> None:
    assert page() == page({"recover": "finetune", "steps": 10}) == ""
    facts: Any = SimpleNamespace(manifest={})
    assert STAGE.report(facts.manifest) == ""


def test_units_parameters_and_the_error_of_each_refitted_layer() -> None:
    layers = [
        layer("model.layers.0.mlp.down_proj", 0.02),
        layer("model.layers.1.mlp.down_proj", 0.04, notes={"steps": 12.0}),
    ]
    html = page({**CUT, "remove": "ffn", "layers": layers})
    found = rows(html)
    assert ["channels (ffn)", "obs", "96", "64", "200,000", "150,000", "-25.0%"] in found
    assert ["model.layers.0.mlp.down_proj", "96", "64", "2.000%", "0.01", ""] in found
    assert ["model.layers.1.mlp.down_proj", "96", "64", "4.000%", "0.01", "steps 12"] in found
    assert html.count("<svg") == 1
    assert "layers that read channels gave" in html


def test_layers_whose_error_nobody_asked_for_have_no_chart() -> None:
    html = page({**CUT, "remove": "ffn", "layers": [layer("model.layers.0.mlp.down_proj", None, damping=None)]})
    assert "<svg" not in html
    assert ["model.layers.0.mlp.down_proj", "96", "64", "–", "–", ""] in rows(html)


@pytest.mark.usefixtures("drawn_charts")
def test_two_passes_have_charts_of_their_own() -> None:
    one = {**CUT, "remove": "ffn", "layers": [layer("model.layers.0.mlp.down_proj", 0.1)]}
    two = {**CUT, "remove": "heads", "unit": "heads", "layers": [layer("model.layers.0.self_attn.o_proj", 0.1)]}
    html = page(one, two)
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert html.count("<svg") == 2
    assert ids
    assert len(ids) == len(set(ids))


def test_ranks_of_layers_and_which_stay() -> None:
    made = {**CUT, "remove": "layers", "method": "block_influence", "before": 3, "after": 2, "unit": "layers"}
    html = page({**made, "ranks": [[0.5, 0.01, 0.25]], "kept": [[0, 2]]})
    assert rows(html)[-3:] == [["0", "0.5", "stays"], ["1", "0.01", "removed"], ["2", "0.25", "stays"]]
    assert "Ranks of the layers by block_influence" in html
    both = page({**made, "ranks": [[0.5, 0.1, 1.0]] * 2, "kept": [[0, 2], [0, 2]]})
    assert "of the encoder by" in both
    assert "of the decoder by" in both


def test_experts_that_stay_and_times_that_were_measured() -> None:
    made = {**CUT, "remove": "experts", "method": "reap", "before": 8, "after": 6, "unit": "experts"}
    own = layer("model.layers.0.mlp.experts", 0.03, experts=[0, 1, 2, 5, 6, 7], notes={"routing_weight_kept": 0.91})
    assert "experts 0, 1, 2, 5, 6, 7; routing weight kept 0.91" in rows(page({**made, "layers": [own]}))[-1]
    measured = {
        "of": "a decoded token", "device": "cpu", "threads": 2, "layers": [1, 3], "seconds": {"32": 0.001, "96": 0.002},
        "before": 0.002, "after": 0.0015,
    }  # fmt: skip
    html = page({**CUT, "remove": "ffn", "measured": measured})
    assert ["32", "1 ms", "50%"] in rows(html)
    assert "a decoded token takes 2 ms of the whole model and about 1.5 ms" in html
    assert "on cpu (2 threads), by models of zeros with 1 and 3 layers" in html


def test_names_are_text() -> None:
    evil = "<script>alert('x')</script>\"&"
    html = page(
        {
            **CUT,
            "remove": evil,
            "method": evil,
            "unit": evil,
            "layers": [layer(evil, 0.1)],
            "ranks": [[1.0]],
            "kept": [[0]],
        }
    )
    assert "<script" not in html


def test_rows_of_a_recovery() -> None:
    made = {"recover": "finetune", "steps": 400, "perplexity_before": 9.87, "perplexity_after": 6.54}
    assert row_of(made) == ("recovery by finetune, perplexity of held-out rows", "9.87", "6.54", "")
    assert row_of({"recover": "finetune", "steps": 400}) == ("recovery by finetune", "", "", "400 steps")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run(*arguments)` gives what a command that must end well wrote to stdout."""
    monkeypatch.setenv("COLUMNS", "200")

    def go(*arguments: Any) -> str:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        return captured.out

    return go


def test_every_command_tells_of_the_passes(run: Any, tiny_llama: Any, tiny_text: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "small",
        "model": str(tiny_llama()),
        "calibration": {"data": str(tiny_text), "samples": 4, "sequence_length": 32},
        "stages": [
            {"structure": {"method": "obs", "remove": "ffn", "keep": 64}},
            {"structure": {"method": "block_influence", "remove": "layers", "keep": 1}},
        ],
    }
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(recipe))
    planned = run("plan", file, "--output", tmp_path / "out")
    assert re.search(r"First: ffn \d+ -> 64 channels by obs, readers refitted\n", planned)
    assert re.search(r"First: layers 2 -> 1 layers by block_influence\n", planned)
    assert planned.index("First:") < planned.index("Model:")
    applied = run("apply", file, "--output", tmp_path / "out", "--quiet", "--prompt", "")
    manifest = json.loads((tmp_path / "out" / "compress.json").read_text())
    ffn, layers = manifest["passes"]
    source = Checkpoint(tiny_llama())  # its head is its embedding, which is stored once and counted once
    assert ffn["parameters_before"] == sum(math.prod(source.shape(name)) for name in source.names())
    assert re.search(rf"channels by obs +{ffn['before']} +64 +parameters {ffn['parameters_before']:,} -> ", applied)
    assert re.search(r"layers by block_influence +2 +1 +parameters ", applied)
    seen = run("inspect", tmp_path / "out")
    change = f"{layers['parameters_before']:,} -> {layers['parameters_after']:,}"
    assert f"Pass: layers by block_influence 2 -> 1; parameters {change}" in seen
    assert json.loads(run("inspect", tmp_path / "out", "--json"))["passes"] == manifest["passes"]
    report = (tmp_path / "out" / "report.html").read_text()
    assert "What was removed" in report
    assert "was dropped: removed by an earlier stage" not in report  # it was asked for
