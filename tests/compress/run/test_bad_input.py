"""The issue's list of bad input, through the real command line: one sentence, exit code 2, nothing lost and nothing written."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from warm_python import python

from compress.cli import main

W4 = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}
GPTQ = {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}}


@pytest.fixture
def ask(make_checkpoint, recipe, tmp_path, capsys):
    """`ask(stages, model=..., **sections)` applies a recipe file and returns (exit code, stderr's sentence)."""

    def run(*stages, model=None, **sections):
        file = tmp_path / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe(model or make_checkpoint(), *stages, **sections)))
        code = main(["apply", str(file), "--output", str(tmp_path / "out"), "--quiet"])
        sentence = capsys.readouterr().err.strip()
        return code, sentence.splitlines()[-1]

    yield run
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir()), "a refused request writes nothing"


def refused(answer, *words):
    code, sentence = answer
    assert code == 2, sentence
    for word in words:
        assert word in sentence, sentence
    assert "Traceback" not in sentence


def test_misspelt_model(ask, make_checkpoint):
    path = make_checkpoint(name="my-llama")
    refused(ask(W4, model=path.with_name("my-lama")), "my-lama", "did you mean", "my-llama")


def test_directory_that_is_no_checkpoint(ask, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(ask(W4, model=tmp_path / "empty"), "config.json")


def test_missing_shard(ask, make_checkpoint):
    model = make_checkpoint(shards="60KB")
    victim = sorted(model.glob("*.safetensors"))[1]
    victim.unlink()
    refused(ask(W4, model=model), victim.name, "missing")


def test_truncated_file(ask, make_checkpoint):
    model = make_checkpoint()
    file = model / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    refused(ask(W4, model=model), "model.safetensors", "truncated")


def test_tensor_of_the_wrong_shape(ask, make_checkpoint):
    model = make_checkpoint()
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file(
        {**tensors, name: tensors[name][:-1].contiguous()}, model / "model.safetensors", metadata={"format": "pt"}
    )
    refused(ask(W4, model=model), name, "[63, 64]", "[64, 64]")


def test_pickle_only(ask, make_checkpoint):
    model = make_checkpoint()
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    refused(ask(W4, model=model), "pickle", "pytorch_model.bin", "save_pretrained")


def test_empty_calibration_text(ask, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    refused(ask(GPTQ, calibration={"data": str(tmp_path / "empty.txt"), "sequence_length": 32}), "empty.txt", "no text")


def test_calibration_shorter_than_a_sequence(ask, tmp_path):
    (tmp_path / "short.txt").write_text("ten bytes!")
    refused(ask(GPTQ, calibration={"data": str(tmp_path / "short.txt"), "sequence_length": 32}), "tokens", "32")


def test_ids_outside_the_vocabulary(ask, make_checkpoint):
    refused(ask(GPTQ, model=make_checkpoint(vocab_size=100)), "vocabulary", "100")


def test_group_larger_than_the_row(ask):
    answer = ask({"quantize": {"method": "rtn", "bits": 4, "group_size": 128}})
    refused(answer, "group", "128", "64", "model.layers.0", "recipe.yaml:")


def test_two_of_four_on_a_width_that_does_not_divide(ask, make_checkpoint):
    model = make_checkpoint(intermediate_size=98)
    refused(ask({"prune": {"method": "magnitude", "pattern": "2:4"}}, model=model), "98", "down_proj", "2:4")


def test_target_that_matches_nothing(ask):
    refused(ask({"quantize": {**W4["quantize"], "targets": ["*.q_porj"]}}), "q_porj", "recipe.yaml:")


def test_output_that_holds_something_else(make_checkpoint, recipe, tmp_path, capsys):
    file, output = tmp_path / "recipe.yaml", tmp_path / "full"
    output.mkdir()
    (output / "thesis.txt").write_text("years of work")
    file.write_text(yaml.safe_dump(recipe(make_checkpoint(), W4)))
    assert main(["apply", str(file), "--output", str(output), "--quiet"]) == 2
    assert "thesis.txt" in capsys.readouterr().err
    assert (output / "thesis.txt").read_text() == "years of work"
    assert len(list(output.iterdir())) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: [unclosed", ["recipe.yaml"]),
        ("name: x\n\tmodel: y\n", ["tab"]),
        ("name: x\nname: y\n", ["already given in line 1"]),
        ("just words", ["recipe.yaml"]),
        ("name: x\nmodel: y\nstages:\n" + "  - quantize: {method: rtn}\n" * 10_000, ["more than 100"]),
    ],
)
def test_text_that_is_no_recipe(tmp_path, capsys, text, words):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert main(["apply", str(file), "--output", str(tmp_path / "out")]) == 2
    sentence = capsys.readouterr().err
    for word in words:
        assert word in sentence.replace(",", ""), sentence
    assert not (tmp_path / "out").exists()


FULL = """
import sys
from compress.weights import shard
real = shard.save_file
count = 0
def full(tensors, path, metadata=None):
    global count
    count += 1
    if count == 2:
        raise OSError(28, "No space left on device")
    real(tensors, path, metadata=metadata)
shard.save_file = full
from compress.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_full_disk_ends_cleanly_and_resumes(make_checkpoint, recipe, tmp_path):
    file, output = tmp_path / "recipe.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(recipe(make_checkpoint(), W4)))
    command = ["apply", str(file), "--output", str(output), "--quiet", "--json"]
    first = subprocess.run([python(), "-c", FULL, *command], capture_output=True, text=True)
    assert first.returncode == 1
    assert "disk is full" in json.loads(first.stdout)["error"]
    assert not (output / "compress.json").exists()
    again = subprocess.run([python(), "-m", "compress.cli", *command, "--resume"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert (output / "compress.json").is_file()
