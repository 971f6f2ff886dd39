"""A run killed with -9 at any moment goes on with --resume and ends with the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time

import pytest
import yaml
from random_models import UNLIMITED
from runs import same_bytes
from warm_python import python

import compress
from runtime.errors import RequestError
from runtime.system.self_hash import sealed_json

KILLS = int(
    os.environ.get("KILLS") or 2
)  # each costs the start of a process; `tests/faults` has hundreds of moments without one
PROGRAM = """
import sys, json, torch
torch.set_num_threads(1)
from compress.recipe import load
from compress.run.run import apply
print("ready", flush=True)
apply(load(sys.argv[1]), output=sys.argv[2], resume=True, quiet=True)
"""


@pytest.fixture
def job(make_checkpoint, recipe, tmp_path):
    model = make_checkpoint(num_hidden_layers=6)
    data = recipe(model)["calibration"]["data"]
    evaluate = {**UNLIMITED, "data": data, "sequence_length": 32, "samples": 8}
    stages = (
        {"prune": {"method": "sparsegpt", "pattern": "2:4"}},
        {"quantize": {"method": "gptq", "bits": 4, "group_size": 32}},
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(model, *stages, evaluate=evaluate)))
    return file


def start(job, output):
    process = subprocess.Popen([python(), "-c", PROGRAM, str(job), str(output)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_kill_at_random_moments(job, tmp_path):
    straight = tmp_path / "straight"
    began = time.monotonic()
    assert start(job, straight).wait() == 0
    seconds = time.monotonic() - began
    output = tmp_path / "killed"
    seed = int(os.environ.get("KILL_SEED") or time.time_ns())
    print(f"KILL_SEED={seed} repeats these moments")
    moments = random.Random(seed)
    kills = 0
    while kills < KILLS:
        process = start(job, output)
        # A window smaller than the run, so that kills land all along it as the run moves on.
        time.sleep(moments.uniform(0, seconds / 3))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            assert not (output / "compress.json").exists() or (output / "compress.json").stat().st_size > 0
            continue
        assert process.returncode == 0
        same_bytes(straight, output)
        output = tmp_path / f"killed-{kills}"
    assert start(job, output).wait() == 0
    same_bytes(straight, output)


def test_resume_starts_at_the_next_block(job, tmp_path, monkeypatch):
    from compress.run import run
    from compress.weights import block_pass

    real, seen = block_pass.run_block, []

    def stop_at(limit):
        def one_block(job, index, states):
            if index == limit:
                raise KeyboardInterrupt
            seen.append(index)
            return real(job, index, states)

        return one_block

    from compress.recipe import load

    for limit in (2, 4):
        monkeypatch.setattr(block_pass, "run_block", stop_at(limit))
        with pytest.raises(KeyboardInterrupt):
            run.apply(load(job), output=tmp_path / "out", resume=True, quiet=True)
    monkeypatch.setattr(block_pass, "run_block", stop_at(-1))
    run.apply(load(job), output=tmp_path / "out", resume=True, quiet=True)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_resume_refuses_another_request(job, tmp_path, monkeypatch):
    from compress.recipe import load
    from compress.run import run
    from compress.weights import block_pass

    monkeypatch.setattr(block_pass, "run_block", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.apply(load(job), output=tmp_path / "out", quiet=True)
    monkeypatch.undo()
    with pytest.raises(RequestError, match="--resume"):
        compress.apply(job, output=tmp_path / "out", quiet=True)
    with pytest.raises(RequestError, match="another recipe"):
        compress.apply(job, output=tmp_path / "out", set=["stages.1.quantize.bits=3"], resume=True, quiet=True)
    state = tmp_path / "out/.compress/run.json"
    state.write_text(sealed_json({**json.loads(state.read_text()), "source_fingerprint": "other"}))
    with pytest.raises(RequestError, match="another source fingerprint"):
        compress.apply(job, output=tmp_path / "out", resume=True, quiet=True)
