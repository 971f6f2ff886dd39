"""Trials on Ray: the same function, the same numbers; skipped where Ray is not installed."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from sweep_runs import BITS

from compress.sweeps.run import sweep
from runtime.errors import RequestError

PATIENCE = 120.0


def test_without_ray_the_extra_is_named(settings, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"compress-checkpoints\[ray\]"):
        sweep(settings(vary={BITS: [4]}, ray={}), output=tmp_path / "out", device="cpu", quiet=True)
    done = run(settings(vary={BITS: [4]}))
    assert done.summary["counts"]["finished"] == 1, "a sweep without trials is none that must be resumed"


@pytest.fixture
def cluster(monkeypatch):
    """A Ray of this machine with two CPUs, which its workers find this checkout on."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_a_sweep_on_ray(cluster, run, settings, tmp_path):
    chosen = settings(vary={BITS: [3, 8]}, keep="all")
    done = sweep({**chosen, "ray": {"cpus": 1}}, output=tmp_path / "ray", device="cpu", quiet=True)
    here = run(chosen)
    assert [trial["status"] for trial in done.trials] == ["finished", "finished"]
    assert [trial["metrics"] for trial in done.trials] == [trial["metrics"] for trial in here.trials]
    assert cluster.is_initialized(), "a Ray that others have started is left running"
    for trial in ("0000", "0001"):
        one, other = (path / "trials" / trial for path in (done.path, here.path))
        for file in one.glob("*.safetensors"):
            assert file.read_bytes() == (other / file.name).read_bytes()
    with pytest.raises(RequestError, match="64 CPUs"):
        sweep({**chosen, "ray": {"cpus": 64}}, output=tmp_path / "other", device="cpu", quiet=True)


@pytest.mark.slow
def test_a_worker_that_is_killed(cluster, tmp_path):
    from compress.sweeps.executors.ray_cluster import RayExecutor
    from compress.sweeps.models import RayConfig

    executor = RayExecutor(RayConfig(), "cpu")
    assert executor.slots == 2
    executor.task = cluster.remote(num_cpus=1, max_retries=0, max_calls=1)(sleep)
    log = str(tmp_path / "log")
    executor.start(7, {"log": log, "file": str(tmp_path / "pid")})
    executor.start(8, {"log": log, "file": ""})
    assert executor.wait() == [(8, {"status": "finished"})]
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    ((number, outcome),) = executor.wait()
    assert (number, outcome["status"]) == (7, "failed")
    assert "its worker process died" in outcome["error"]
    executor.close()


def sleep(job):
    if job["file"]:
        with open(job["file"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(PATIENCE)
    return {"status": "finished"}
