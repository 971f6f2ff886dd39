"""Codebook representation of another package (k-means, 3 bits): through the column loop, onto the disk, run, resumed, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import TIMED
from safetensors import safe_open

# A run that ends, as if it were killed, as soon as the first block is recorded.
KILLED = """
import os, sys
import compress
from compress.core.run_directory import RunDirectory
commit = RunDirectory.commit
def then_end(self, part, *rest):
    commit(self, part, *rest)
    if part == "block-00000":
        os._exit(9)
RunDirectory.commit = then_end
compress.apply(sys.argv[1], output=sys.argv[2], quiet=True)
"""
RUN = """
import json, sys
import torch, transformers
import runtime
path, layer, prompt = sys.argv[1], sys.argv[2], [5, 60, 7, 200]
model = runtime.load(path)
text = model.generate("line 3: ", max_new_tokens=4)
packed = transformers.AutoModelForCausalLM.from_pretrained(path)
module = packed.get_submodule(layer)
values = [len(row.unique()) for row in module.dequantize().reshape(1, -1)]
ids = torch.tensor([prompt])
logits = packed(ids).logits
for name, part in list(packed.named_modules()):
    if type(part).__name__ == "CompressedLinear":
        home, _, leaf = name.rpartition(".")
        setattr(packed.get_submodule(home), leaf, part.dense())
same = torch.equal(packed(ids).logits, logits)
print(json.dumps({"values": values, "same": same, "kernel": module.kernel_name, "text": isinstance(text, str)}))
"""
#: On random weights and correlated inputs: output errors of the column loop and of rounding to nearest, and what comes back from disk.
SOLVE = """
import json, torch
from compress.core.method import Problem
from compress.core.statistics import StatisticsCollector
from compress.quantize import METHODS, resolve_scheme
from compress.weights.solver.group import solve_group
from runtime import formats
torch.manual_seed(0)
x = torch.randn(512, 64) @ torch.randn(64, 64)
collector = StatisticsCollector(64, hessian=True)
collector.add(x)
statistics, weight, found = collector.finish(), torch.randn(40, 64), {}
for vector in (1, 2):
    for method in ("rtn", "gptq"):
        config = METHODS[method].config(scheme={"representation": "kmeans", "bits": 3, "vector": vector})
        scheme = resolve_scheme(config)
        solved = solve_group(Problem([weight], statistics, None, config, scheme, torch.bfloat16))[0]
        storage = formats.choose(scheme, (40, 64))
        tensors = storage.pack(solved.weight)
        again = storage.unpack(tensors, scheme, (40, 64), torch.bfloat16)
        rows = torch.tensor([3, 39])
        few = storage.unpack(storage.select_rows(tensors, scheme, (40, 64), rows), scheme, (2, 64), torch.bfloat16)
        lost = (weight - again.dequantize().float()) @ statistics.hessian
        exact = float((lost * (weight - again.dequantize().float())).sum() / ((weight @ statistics.hessian) * weight).sum())
        found[f"{method} {vector}"] = {
            "error": solved.error, "exact": exact, "same": torch.equal(again.dequantize(), solved.weight.dequantize()),
            "rows": torch.equal(few.dequantize(), again.dequantize()[rows]), "bytes": tensors["weight_packed"].numel() * 4,
            "estimate": storage.bytes_estimate(scheme, (40, 64), torch.bfloat16),
        }
print(json.dumps(found))
"""
#: A recipe that trains after it has quantized.
RECOVER = """
from compress.recipe import load
from compress.recipe.targets import ModuleInfo
from compress.weights.assign import assign
from runtime.errors import RequestError
stages = [
    {"quantize": {"method": "rtn", "scheme": {"representation": "kmeans"}}},
    {"recover": {"method": "finetune"}},
]
modules = [ModuleInfo("model.layers.0.mlp.down_proj", "Linear", (8, 16))]
assert assign(load({"name": "t", "model": "m", "stages": stages[::-1]}), modules)[0]
try:
    assign(load({"name": "t", "model": "m", "stages": stages}), modules)
except RequestError as error:
    print(error)
"""
LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def recipe(tiny_llama, tiny_text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    stage: dict[str, Any] = {
        "method": "gptq",
        "scheme": {"representation": "kmeans", "bits": 3, "vector": 2},
        "targets": ["*.down_proj"],
    }
    calibration = {"data": str(tiny_text), "samples": 4, "sequence_length": 32}
    file = tmp_path_factory.mktemp("codebook") / "recipe.yaml"
    content = {
        "name": "codebook",
        "model": str(tiny_llama()),
        "calibration": calibration,
        "stages": [{"quantize": stage}],
    }
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="module")
def artifact(extension, recipe: Path) -> Path:
    output = recipe.with_name("straight")
    extension.compress("apply", recipe, "-o", output, "--quiet")
    return output


def test_the_column_loop_beats_rounding_and_the_disk_gives_the_same_weight(extension) -> None:
    found = json.loads(extension.python(SOLVE).stdout)
    for vector in (1, 2):
        for method in ("rtn", "gptq"):
            one = found[f"{method} {vector}"]
            assert one["same"]
            assert one["rows"]
            assert one["error"] == pytest.approx(one["exact"], rel=2e-3)
            assert one["bytes"] == 40 * 64 * 3 // 8, "three bits a weight"
            assert one["estimate"] == one["bytes"] + 2 * vector * 8**vector, "and one codebook in bfloat16"
        assert found[f"gptq {vector}"]["error"] < 0.7 * found[f"rtn {vector}"]["error"]


def test_what_is_on_the_disk(artifact: Path) -> None:
    config = json.loads((artifact / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["quant_method"] == "compress"
    assert group["format"] == "kmeans"
    assert group["weights"] == {"representation": "kmeans", "bits": 3, "vector": 2}
    index = json.loads((artifact / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(artifact / index[f"{LAYER}.weight_packed"], "pt") as file:
        rows, words = file.get_slice(f"{LAYER}.weight_packed").get_shape()
        assert file.get_slice(f"{LAYER}.weight_codebook").get_shape() == [64, 2]
        shape = next(layer["shape"] for layer in json.loads((artifact / "compress.json").read_text())["layers"])
    assert [rows, words] == [shape[0], -(-shape[1] * 3 // 32)]
    line = next(
        layer for layer in json.loads((artifact / "compress.json").read_text())["layers"] if layer["name"] == LAYER
    )
    assert line["method"].startswith("gptq kmeans 3 bits")
    assert line["format"] == "kmeans"


def test_it_is_loaded_and_run(extension, artifact: Path) -> None:
    found = json.loads(extension.python(RUN, artifact, LAYER).stdout.splitlines()[-1])
    assert found["values"][0] <= 128, "64 pairs"
    assert found["same"], "the packed model computes with the dequantized weights"
    assert found["kernel"] == "reference"
    assert found["text"]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(extension, artifact: Path, recipe: Path) -> None:
    killed = recipe.with_name("killed")
    assert extension.python(KILLED, recipe, killed, check=False).returncode == 9
    assert not (killed / "config.json").exists()
    extension.compress("apply", recipe, "-o", killed, "--resume", "--quiet")
    names = {file.name for file in artifact.iterdir() if file.name not in TIMED}
    assert names == {file.name for file in killed.iterdir() if file.name not in TIMED}
    for name in names:
        assert (artifact / name).read_bytes() == (killed / name).read_bytes(), name


@pytest.mark.slow
def test_gguf_refuses_it_in_a_sentence(extension, artifact: Path) -> None:
    done = extension.compress("export", artifact, "--target", "gguf", check=False)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "target gguf cannot hold" in said
    assert f"the weights of {LAYER} are stored as representation kmeans" in said


def test_without_the_package_the_artifact_says_what_is_missing(artifact: Path) -> None:
    import runtime

    with pytest.raises(runtime.errors.ArtifactError, match="'kmeans'"):
        runtime.load(artifact)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"representation": "kmeans", "bits": 30}, "bits"),
        ({"representation": "kmeanz"}, "kmeanz"),
        ({"bits": 3}, "representation"),
    ],
)
def test_wrong_fields_of_a_recipe_are_named(
    extension, recipe: Path, tmp_path: Path, fields: dict[str, Any], key: str
) -> None:
    content = yaml.safe_load(recipe.read_text())
    content["stages"][0]["quantize"]["scheme"] = fields
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(content))
    done = extension.compress("plan", wrong, check=False)
    assert done.returncode == 2
    assert key in done.stderr
    assert "scheme" in done.stderr


def test_recovery_after_it_is_refused(extension) -> None:
    said = extension.python(RECOVER).stdout
    assert "recover" in said
    assert "stores model.layers.0.mlp.down_proj as kmeans" in said
