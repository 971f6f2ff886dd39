"""A bound of memory: what is done to keep to it changes no byte (or is kept with the run), and what cannot be kept is refused at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCABULARY, byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import compress
from compress.cli import main
from compress.core import file_matrix
from compress.core.memory_bounds import Bounds, choose, cut, ways
from compress.run import plan as footprint
from compress.weights import block_pass
from runtime.errors import CompressError, RequestError

GPTQ = {"quantize": {"method": "gptq", "bits": 4, "group_size": 32, "ignore": []}}
SPARSE = {"prune": {"method": "sparsegpt", "pattern": "2:4", "ignore": ["lm_head"]}}
AWQ = {"quantize": {"method": "awq", "bits": 4, "group_size": 32}}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits count what is taken beside the process, which tests share."""
    monkeypatch.setattr(footprint, "memory_bytes", lambda: 0)
    monkeypatch.setattr(footprint, "WORKSPACE", 0)


def shards(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.safetensors"))}


def made(request: dict[str, Any], output: Path, **options: Any) -> dict[str, bytes]:
    return shards(compress.apply(request, output=output, quiet=True, **options).path)


# ---------------------------------------------------------------- ways
def test_each_way_does_more_and_files_come_before_fewer_rows() -> None:
    found = list(ways([96, 64, 96], 5, None, fewer=True))
    assert found[:2] == [Bounds(), Bounds(spill=True)]
    filed = [b for b in found if b.in_files is not None and b.rows is None]
    assert [b.in_files for b in filed] == ([96, 64] if file_matrix.AVAILABLE else [])
    assert [b.rows for b in found if b.rows is not None] == [3, 2, 1]
    assert all(b.rows is None for b in ways([64], 5, None, fewer=False))
    assert {b.rows for b in ways([64], 5, 2, fewer=True)} == {2}, "what a run began with stays"
    assert list(ways([], 0, None, fewer=True)) == [Bounds()]


def test_the_first_way_that_fits_is_taken_or_the_one_that_needs_least() -> None:
    needed = {Bounds(): 100, Bounds(spill=True): 80, Bounds(spill=True, in_files=64): 90}.__getitem__
    found = [Bounds(), Bounds(spill=True), Bounds(spill=True, in_files=64)]
    assert choose(iter(found), needed, 85) == (Bounds(spill=True), 80)
    assert choose(iter(found), needed, 10) == (Bounds(spill=True), 80)
    assert choose(iter(found), needed, 100) == (Bounds(), 100)


def test_batches_are_cut() -> None:
    ids = torch.arange(10).view(5, 2)
    parts = cut((ids, ids > 3), 2)
    assert [len(part) for part, _ in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([mask for _, mask in parts]), ids > 3)
    assert cut((ids, ids), None) == [(ids, ids)]


# ---------------------------------------------------------------- the same bytes
@pytest.mark.sampled(1)
@pytest.mark.skipif(not file_matrix.AVAILABLE, reason="this system cannot let go of mapped pages")
@pytest.mark.parametrize("stages", [[GPTQ], [SPARSE, GPTQ], [AWQ]], ids=["gptq", "sparse", "awq"])
def test_files_change_no_byte(make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: Any, stages: Any) -> None:
    request = recipe(make_checkpoint(intermediate_size=192), *stages)
    whole = made(request, tmp_path / "whole")
    filed: list[int] = []
    real = file_matrix.zeros

    def zeros(rows: int, columns: int, device: Any = "cpu", directory: Path | None = None) -> torch.Tensor:
        filed.extend([columns] if directory is not None else [])
        return real(rows, columns, device, directory)

    monkeypatch.setattr(file_matrix, "zeros", zeros)
    monkeypatch.setattr(footprint, "choose", lambda found, needed, limit: (Bounds(spill=True, in_files=100), 0))
    assert made(request, tmp_path / "filed") == whole
    assert set(filed) == {192}
    assert not list((tmp_path / "filed").glob(".compress"))


def test_a_limit_that_is_ample_changes_nothing(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    request = recipe(make_checkpoint(), GPTQ)
    plan = compress.plan(request, max_memory="64GB")
    assert (plan.bounds, plan.problems, plan.max_memory) == ("", [], 64 * 10**9)
    assert made(request, tmp_path / "with", max_memory="64GB") == made(request, tmp_path / "without")


@pytest.mark.usefixtures("counted")
def test_a_limit_that_is_tight_is_kept_by_all_means(make_checkpoint: Any, recipe: Any) -> None:
    request = recipe(make_checkpoint(intermediate_size=4096), GPTQ)
    request["calibration"] |= {"samples": 64, "sequence_length": 128, "batch_size": 64}
    free = compress.plan(request, max_memory="64GB")
    least = int(compress.plan(request, max_memory=1).problems[0].split("at least ")[1].split("MB")[0]) * 10**6
    sizes = [free.peak_memory]
    limit = free.peak_memory
    while limit > 1:
        plan = compress.plan(request, max_memory=limit - 1)
        if plan.peak_memory >= limit:
            break  # no way needs less; the last one is taken or refused
        limit = plan.peak_memory
        sizes.append(limit)
    assert len(sizes) > 2
    assert "hidden states in files" in plan.bounds
    assert "rows in a batch" in plan.bounds
    assert not file_matrix.AVAILABLE or "inputs or more in files" in plan.bounds
    assert sizes[-1] <= least


# ---------------------------------------------------------------- refused
def test_a_limit_that_is_too_small_is_refused_with_one_that_works(
    make_checkpoint: Any, recipe: Any, tmp_path: Path
) -> None:
    request = recipe(make_checkpoint(), GPTQ)
    with pytest.raises(RequestError, match=r"max_memory 1MB .*at least \d+MB") as raised:
        compress.apply(request, output=tmp_path / "out", quiet=True, max_memory="1MB")
    assert not (tmp_path / "out").exists()
    least = str(raised.value).split("at least ")[1].split(",")[0]
    compress.apply(request, output=tmp_path / "out", quiet=True, max_memory=least)
    for wrong in ("six", "-1GB", 0, True):
        with pytest.raises(RequestError, match="max_memory"):
            compress.plan(request, max_memory=wrong)


def test_commands_take_the_limit(make_checkpoint: Any, recipe: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(recipe(make_checkpoint(), GPTQ)))
    out = [str(tmp_path / "recipe.json"), "--output", str(tmp_path / "out"), "--json"]
    for command in ("plan", "apply"):
        assert main([command, *out, "--max-memory", "2MB"]) == 2
        assert "at least" in json.loads(capsys.readouterr().out)["error"]
    assert main(["plan", *out, "--max-memory", "6 parsecs"]) == 2
    assert "--max-memory must be a number of bytes" in json.loads(capsys.readouterr().out)["error"]
    assert main(["plan", *out, "--max-memory", "60GB"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = found["memory"]
    phases = [size for name, size in parts.items() if name not in ("process", "workspace", "hidden states")]
    assert found["peak_memory"] == parts["process"] + parts["workspace"] + parts["hidden states"] + max(phases)
    assert {"first block", "blocks", "outside", "load back"} <= parts.keys()


MIXTURE = """
import json, sys

import torch

import compress
from compress.evaluate import texts
from runtime.errors import ResourceError

torch.set_num_threads(1)
recipe, output = json.load(open(sys.argv[1])), sys.argv[2]
try:
    compress.apply(recipe, output=output, quiet=True, max_memory=1)
except ResourceError as error:
    least = int(str(error).split("at least ")[1].split("MB")[0])
judged, texts.doubt = texts.doubt, lambda _: []  # the plan would run the model, which leaves the process larger
free = compress.plan(recipe).peak_memory
texts.doubt = judged
made = compress.apply(recipe, output=output, quiet=True, max_memory=f"{least}MB")
print(json.dumps({"least": least * 10**6, "free": free, "took": made.peak_memory, "warnings": made.warnings}))
"""


@pytest.mark.slow
def test_a_mixture_of_experts_keeps_to_the_least_that_is_named(recipe: Any, tmp_path: Path) -> None:
    """Each expert reads another number of tokens, so kernels are made for hundreds of shapes; and many experts are starved."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, moe_intermediate_size=512, num_experts=24, num_experts_per_tok=2, eos_token_id=256,
    )  # fmt: skip
    path = tmp_path / "mixture"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    request = recipe(path, {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}})
    request["calibration"] |= {"samples": 16, "sequence_length": 128, "batch_size": 4}
    (tmp_path / "recipe.json").write_text(json.dumps(request))
    command = [sys.executable, "-c", MIXTURE, str(tmp_path / "recipe.json"), str(tmp_path / "out")]
    environment = {
        k: v for k, v in os.environ.items() if k not in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["took"] <= found["least"], found["warnings"]
    assert found["least"] < 1.02 * found["free"], (
        "a bound needs no more than none, but for what the process has grown by"
    )


# ---------------------------------------------------------------- fewer rows, and going on
@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_fewer_rows_stay_with_the_run(make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: Any) -> None:
    request = recipe(make_checkpoint(), GPTQ)
    request["calibration"] |= {"samples": 16, "batch_size": 8}
    ample, tight = "64GB", 10**9

    def least(found: Any, needed: Callable[[Bounds], int], limit: float) -> tuple[Bounds, int]:
        every = list(found)
        return (every[-1] if limit == tight else every[0]), 0

    monkeypatch.setattr(footprint, "choose", least)
    whole = made(request, tmp_path / "whole", max_memory=tight)
    assert json.loads((tmp_path / "whole" / "compress.json").read_text())["identity"]["batch_rows"] == 1
    one_block = block_pass.run_block

    def stopping(job: Any, index: int, *rest: Any) -> Any:
        if index == 2:
            raise CompressError("stopped")
        return one_block(job, index, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(block_pass, "run_block", stopping)
        with pytest.raises(CompressError, match="stopped"):
            compress.apply(request, output=tmp_path / "on", quiet=True, max_memory=tight)
    assert made(request, tmp_path / "on", resume=True, max_memory=ample) == whole
    assert made(request, tmp_path / "on", resume=True) == whole, "finished"
    plain = compress.apply(request, output=tmp_path / "plain", quiet=True)
    assert "batch_rows" not in plain.manifest["identity"]


# ---------------------------------------------------------------- what is counted
def test_memory_is_flat_in_depth_and_grows_with_width(make_checkpoint: Any, recipe: Any) -> None:
    def phases(stage: Any, **config: Any) -> dict[str, int]:
        name = "-".join(f"{key}{value}" for key, value in config.items()) or "plain"
        plan = compress.plan(recipe(make_checkpoint(name=name + stage["quantize"]["method"], **config), stage))
        return {key: size for key, size in plan.memory.items() if key != "process"}

    rtn = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}
    few, many = phases(GPTQ, num_hidden_layers=2), phases(GPTQ, num_hidden_layers=6)
    assert {k: v for k, v in few.items() if k != "load back"} == {k: v for k, v in many.items() if k != "load back"}
    wide = phases(GPTQ, intermediate_size=2048)
    assert wide["blocks"] - phases(rtn, intermediate_size=2048)["blocks"] > 4 * 2048**2
    assert phases(AWQ, intermediate_size=2048)["blocks"] > phases(AWQ)["blocks"] + 4 * 2048**2
