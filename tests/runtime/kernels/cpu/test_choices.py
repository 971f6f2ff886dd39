"""Which kernel is chosen: measured once, remembered, never in the way; and what runs where there is no compiler."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from compressed_models import SCHEMES
from products import linear
from weight_cases import int_scheme

from runtime import formats, kernels
from runtime.formats.quantization_config import ModuleEntry
from runtime.kernels import tuning
from runtime.kernels import tuning as remembered
from runtime.kernels.base import Choice, Kernel, Layer
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import prepare_all

needs_c = pytest.mark.skipif(library.load() is None, reason="needs a C compiler")
SHAPE = (1024, 512)  # large enough to be worth measuring


class Clock:
    """Stands in for `time`: only kernels that sleep move it, so a busy machine changes nothing."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Sleeper(Kernel):
    """A kernel that takes as long as it is told, by that clock."""

    device, formats, layout = "cpu", frozenset(), "bed"

    def __init__(self, name, seconds):
        self.name, self.seconds, self.runs = name, seconds, 0

    def why_not(self, layer):
        return None

    def sample(self, layer):
        return {}

    def run(self, x, tensors, layer, bias):
        self.runs += 1
        tuning.time.now += self.seconds
        return x


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "remembered", {})
    monkeypatch.setattr(remembered, "complained", set())
    return tmp_path / "tuning" / f"cpu-{tuning.machine()}.json"


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(tuning, "time", Clock())
    return linear(int_scheme(4, True, 64), SHAPE)[0].layer


def pick(layer, *sleepers):
    with tuning.measuring():
        return tuning.fastest(layer, "prefill", sleepers)


def test_the_first_wins_unless_another_is_clearly_faster(layer):
    assert pick(layer, Sleeper("a", 0.02), Sleeper("b", 0.01)).name == "b"
    assert pick(layer, Sleeper("c", 0.0102), Sleeper("d", 0.01)).name == "c"


@pytest.mark.parametrize("mode", kernels.MODES)
@pytest.mark.parametrize("name", SCHEMES)
def test_kernels_are_chosen_for_layers_of_every_format_that_are_worth_measuring(name: str, mode: str) -> None:
    scheme = SCHEMES[name]
    entry = ModuleEntry(scheme, formats.choose(scheme, SHAPE).name)
    layer = Layer(entry, SHAPE, torch.bfloat16, torch.device("cpu"))
    with tuning.measuring():
        chosen = kernels.find(layer, mode)
    able = {kernel.name for kernel in (*kernels.candidates(layer), kernels.REFERENCE)}
    assert {chosen.decode.name, chosen.batch.name, chosen.prefill.name} <= able


def test_a_choice_is_remembered_by_the_process_and_by_the_file(layer, own_cache):
    pick(layer, Sleeper("a", 0.004), Sleeper("b", 0.001))
    content = json.loads(own_cache.read_text())
    assert content["version"] == remembered.VERSION
    assert list(content["choices"].values()) == ["b"]
    swapped = Sleeper("a", 0.001), Sleeper("b", 0.004)
    assert tuning.fastest(layer, "prefill", swapped).name == "b"  # also while nothing may be measured
    tuning.remembered.clear()
    assert pick(layer, *swapped).name == "b"
    assert swapped[0].runs == swapped[1].runs == 0


def test_nothing_is_measured_outside_of_loading_nor_beyond_the_budget(layer):
    slow = Sleeper("a", 0.2), Sleeper("b", 0.1)
    assert tuning.fastest(layer, "prefill", slow).name == "a"
    assert slow[0].runs == 0
    assert pick(layer, *slow).name == "a"
    assert tuning.time.now <= tuning.BUDGET + 0.2
    small = linear(int_scheme(4, True, 64), (64, 128))[0].layer
    assert pick(small, *slow).name == "a"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "choices": {"a": 3}}', "\x00\xff", "[" * 100000]
)
def test_a_damaged_file_is_ignored_and_replaced(layer, own_cache, content, caplog):
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "compress.kernels"):
        assert pick(layer, Sleeper("a", 0.004), Sleeper("b", 0.001)).name == "b"
    assert len([r for r in caplog.records if "ignoring the tuning file" in r.message]) == 1
    assert list(json.loads(own_cache.read_text())["choices"].values()) == ["b"]


def test_another_version_is_measured_again(layer, own_cache):
    pick(layer, Sleeper("a", 0.004), Sleeper("b", 0.001))
    content = json.loads(own_cache.read_text()) | {"version": 0}
    own_cache.write_text(json.dumps(content))
    tuning.remembered.clear()
    assert pick(layer, Sleeper("a", 0.001), Sleeper("b", 0.004)).name == "a"
    assert json.loads(own_cache.read_text())["version"] == remembered.VERSION


def test_a_directory_that_cannot_be_written(layer, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "compress.kernels"):
        for _ in range(3):
            assert pick(layer, Sleeper("a", 0.004), Sleeper("b", 0.001)).name == "b"
    assert [record.message.partition(" tuning")[0] for record in caplog.records] == ["cannot remember"]


def test_names_of_choices():
    a, b = Sleeper("a", 0), Sleeper("b", 0)
    assert str(Choice(a, a, a)) == "a"
    assert str(Choice(a, a, b)) == "a (decode, batch), b (prefill)"
    assert str(Choice(a, b, a)) == "a (decode, prefill), b (batch)"
    assert [kernels.shape_class(rows) for rows in (0, 1, 2, 64, 65)] == [
        "decode",
        "decode",
        "batch",
        "batch",
        "prefill",
    ]


@needs_c
def test_loading_measures_each_kind_of_layer_once(own_cache):
    net = torch.nn.ModuleList([linear(int_scheme(4, True, 64), SHAPE)[0] for _ in range(3)])
    chosen = prepare_all(net)
    assert set(chosen.values()) <= {"int4-c", "int4-c (decode, batch), dense-tiles (prefill)"}
    assert len(set(chosen.values())) == 1
    if own_cache.exists():  # a busy machine may run out of the budget
        assert len(json.loads(own_cache.read_text())["choices"]) == 1
    assert {module.prepare("reference").decode.name for module in net} == {"reference"}


WITHOUT = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
import torch
from products import linear
from weight_cases import int_scheme
for _ in range(2):
    for scheme in (int_scheme(4, True, 64), int_scheme(8, True, 64), int_scheme(4, True, 64, "2:4")):
        layer, weight = linear(scheme)
        print(layer.prepare().decode.name, layer.prepare("fast").decode.name, end=" ")
        assert layer(torch.randn(3, 192).to(torch.bfloat16)).shape == (3, 40)
try:
    layer.prepare("sparse24-c")
except ValueError as error:
    print(error, end="")
"""


@pytest.mark.parametrize("switch", [{"COMPRESS_NATIVE": "0"}, {"CC": "/nonexistent"}], ids=str)
def test_without_a_compiler_torch_computes(switch):
    paths = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=os.environ | {"PYTHONPATH": paths} | switch, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = "int4-cpu int4-cpu int8-cpu int8-cpu int4-cpu int4-cpu "
    assert done.stdout.startswith(names * 2)
    assert "there is no compiler" in done.stdout
    said = [line for line in done.stderr.splitlines() if line.startswith("compress.native")]
    assert len(said) == (0 if "COMPRESS_NATIVE" in switch else 1), done.stderr
