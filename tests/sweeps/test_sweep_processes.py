"""Trials as processes: what is killed is told, and a sweep that is killed goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import yaml
from random_models import UNLIMITED
from sweep_runs import BITS, Here

from compress.sweeps.executors import launcher_variables, processes
from compress.sweeps.executors.processes import ProcessExecutor
from compress.sweeps.run import sweep
from runtime.errors import RequestError

PATIENCE = 400.0  # a machine that is busy with others takes minutes to start a process


def until(true, what):
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


# A trial that waits in the fifth block, so that the kill finds it there.
TRIAL = """
import sys, time
from compress.weights import block_pass as blocks
real = blocks.run_block
def one_block(job, index, *rest):
    if index == 4:
        time.sleep(600)
    return real(job, index, *rest)
blocks.run_block = one_block
from compress.sweeps import trial
sys.exit(trial.main(sys.argv[1:]))
"""
SWEEP = f"""
import sys
from compress.sweeps.executors import processes
real = processes.subprocess.Popen
def popen(command, **options):
    return real([sys.executable, "-c", {TRIAL!r}, *command[3:]], **options)
processes.subprocess.Popen = popen
from compress.cli import main
sys.exit(main(sys.argv[1:]))
"""


def command(file, out, *options):
    line = [sys.executable, "-c", SWEEP, "sweep", str(file), "--output", str(out), "--device", "cpu", *options]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def slow(tiny_llama, tiny_text, tmp_path):
    """`slow(bits)`: the file of a sweep whose trials take a moment: a deep model, with calibration."""
    recipe = {
        "name": "deep", "model": str(tiny_llama(num_hidden_layers=10)),
        "calibration": {"data": str(tiny_text), "samples": 16, "sequence_length": 32},
        "stages": [{"quantize": {"method": "gptq", "bits": 4, "group_size": 32}}],
        "evaluate": {**UNLIMITED, "data": str(tiny_text), "sequence_length": 32, "samples": 4},
    }  # fmt: skip
    (tmp_path / "deep.yaml").write_text(yaml.safe_dump(recipe))

    def write(*bits):
        file = tmp_path / "sweep.yaml"
        file.write_text(
            yaml.safe_dump({"name": "deep", "recipe": "deep.yaml", "vary": {BITS: list(bits)}, "keep": "all"})
        )
        return file

    return write


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_that_is_killed_goes_on(slow, run, tmp_path):
    out = tmp_path / "out"
    run(slow(8))
    process = command(slow(8, 3), out, "--resume")
    second = out / "trials" / "0001" / ".compress"
    with process:
        try:
            until(
                lambda: (second / "block-00003.json").is_file() or process.poll() is not None,
                "the middle of the second trial",
            )
            children = psutil.Process(process.pid).children()
        finally:
            process.send_signal(signal.SIGKILL)
    before = {name: (out / "trials" / name).read_bytes() for name in ("0000.json", "0001.json")}
    assert json.loads(before["0000.json"])["status"] == "finished"
    assert json.loads(before["0001.json"])["status"] == "proposed"
    assert len(children) == 1
    until(lambda: not children[0].is_running() or children[0].status() == psutil.STATUS_ZOMBIE, "the trial to end")
    assert len(list(second.glob("block-*.json"))) == 4
    executor = Here()
    result = run(slow(8, 3), executor, resume=True)
    assert executor.started == [1]
    assert (out / "trials" / "0000.json").read_bytes() == before["0000.json"]
    log = (out / "trials" / "0001" / "compress.log").read_text()
    assert "resuming at block 4 of 10" in log, "the blocks that were done are not done again"
    whole = run(slow(8, 3), output=tmp_path / "whole")
    assert [trial["metrics"] for trial in whole.trials] == [trial["metrics"] for trial in result.trials]
    for trial in ("0000", "0001"):
        one, other = (folder / "trials" / trial for folder in (out, whole.path))
        for file in one.glob("*.safetensors"):
            assert file.read_bytes() == (other / file.name).read_bytes()
    assert sorted(file.name for file in (out / ".sweep").iterdir()) == ["identity.json", "lock"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_trial_that_is_killed_loses_itself_only(settings, tmp_path):
    class Killing(ProcessExecutor):
        def start(self, number, job):
            super().start(number, job)
            if number == 0:
                os.kill(self.pids()[0], signal.SIGKILL)

    def make(plan, directory, device):
        return Killing(2, directory, device)

    done = sweep(settings(vary={BITS: [3, 8]}), output=tmp_path / "out", device="cpu", quiet=True, executor=make)
    assert [trial["status"] for trial in done.trials] == ["failed", "finished"]
    assert "SIGKILL" in done.trials[0]["error"]
    assert (tmp_path / "out" / "trials" / "0000.log").is_file()
    assert not (tmp_path / "out" / "trials" / "0001.log").exists()


def test_the_memory_of_a_trial_is_its_own():
    held = np.ones(400_000_000, np.uint8)
    assert processes.peak_of(os.getpid()) > held.nbytes
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        assert 1e6 < processes.peak_of(process.pid) < 1e8, "not what the process that has started it holds"
        process.communicate(b"\n")
    assert processes.peak_of(process.pid) == 0


def test_threads_and_devices_are_shared(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [processes.threads_each(jobs) for jobs in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert processes.threads_each(1) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [processes.threads_each(jobs) for jobs in (1, 2, 4, 8)] == [2, 2, 1, 1]
    assert processes.devices("cpu", 2) == ["cpu", "cpu"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert processes.devices("auto", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert processes.devices("cuda:1", 2) == ["cuda:1", "cuda:1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert processes.devices("auto", 2) == ["auto", "auto"]


@pytest.mark.slow
def test_a_trial_is_not_told_of_other_processes(settings, tmp_path, monkeypatch):
    told = {}

    class Looking(ProcessExecutor):
        def start(self, number, job):
            super().start(number, job)
            environment = psutil.Process(self.pids()[number]).environ
            until(environment, "the environment of the process")
            told.update(environment())

    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MY_RANK", "1")
    chosen = settings(vary={BITS: [8]})
    sweep(
        chosen, output=tmp_path / "out", device="cpu", quiet=True, executor=lambda _, there, on: Looking(1, there, on)
    )
    assert {"MY_RANK", "OMP_NUM_THREADS"} <= told.keys()
    assert launcher_variables(told) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match="WORLD_SIZE"):
        sweep(chosen, output=tmp_path / "other", device="cpu")
