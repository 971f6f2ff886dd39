"""Every section of `benchmarks/gpu.py` in a dry run, each by itself, and what checks notice."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import pytest
import torch
from fake_tensorrt.install import install
from gpu_sections import SECTIONS, Section, gpt_fast, llama, tensorrt, vllm
from gpu_sections.bench import Bench, MissingPeerError
from gpu_sections.kernel_cases import Case, error_of

pytest.importorskip("triton")
STAND_INS = Path(__file__).parent / "stand_ins"
#: Least number of cases, and what rows of the timing must have.
EXPECTED: dict[str, tuple[int, set[str]]] = {
    "kernels": (
        30,
        {"w4a16", "w8a8_float8", "sparse24_w4", "cublas_bf16", "marlin", "machete", "w4a16_share_of_bf16_limit"},
    ),
    "attention": (
        15,
        {
            "fused engine",
            "fused engine, int4",
            "cache int4",
            "sdpa",
            "fused engine, share of the copy bandwidth",
            "fused engine, prompts",
            "sdpa, gathering",
            "share of the bf16 operations",
        },
    ),
    "llama": (4, {"step_ms", "device_ms", "share_of_bandwidth_bound", "prefill_ms"}),
    "vllm": (0, {"step_ms", "prefill_ms"}),
    "gpt_fast": (0, {"step_ms"}),
    "mixture": (5, {"packed_w4_ms", "transformers_bf16_ms", "prefill_ms"}),
    "kv_cache": (4, {"caches", "ours int4 against transformers dynamic"}),
    "drafts": (2, {"verify_2_ms", "tokens_per_second"}),
    "compression": (1, {"seconds", "seconds_by_phase"}),
}


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sections share artifacts."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="session")
def machine() -> subprocess.CompletedProcess[str]:
    """The machine's process, run once for all dry runs."""
    return gpu.ask_machine(dry=True)


def dry_run(section: str, work: Path, output: Path, *more: str) -> tuple[int, dict[str, Any]]:
    command = ["--dry-run", "--only", section, "--minutes", "30", "--work", str(work), "--output", str(output), *more]
    code = gpu.main(command)
    return code, json.loads(output.read_text())["sections"][section]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("name", EXPECTED)
def test_dry_run(
    name: str,
    work: Path,
    tmp_path: Path,
    cache: Path,
    machine: subprocess.CompletedProcess[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    monkeypatch.setattr(gpu, "ask_machine", lambda dry: machine)
    code, parts = dry_run(name, work, tmp_path / "out.json", "--gpt-fast", str(STAND_INS / "gpt_fast"))
    assert code == 0, parts
    cases, columns = EXPECTED[name]
    assert parts.get("check", {}).get("cases", 0) >= cases
    timing = parts["timing"]
    assert timing["status"] == "done", timing
    figures = {key for row in timing["rows"] for key, value in row.items() if value is not None}
    assert columns <= figures, timing["rows"]
    assert {part["dry_run"] for part in parts.values()} == {True}


def test_every_section_has_a_dry_run() -> None:
    assert {section.name for section in SECTIONS} - set(EXPECTED) == {"tensorrt"}  # below, with a stand-in


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_missing_peers_are_said_in_a_sentence_each(work: Path, tmp_path: Path, cache: Path) -> None:
    names, output = ["vllm", "gpt_fast", "tensorrt"], tmp_path / "out.json"
    assert (
        gpu.main(["--dry-run", "--only", *names, "--minutes", "30", "--work", str(work), "--output", str(output)]) == 0
    )
    for name, parts in json.loads(output.read_text())["sections"].items():
        assert parts["timing"]["status"] == "missing peer", name
        assert parts["timing"]["reason"], name


def bench(tmp_path: Path) -> Bench:
    return Bench(True, 600, tmp_path / "record.json", tmp_path)


@pytest.mark.slow
def test_tensorrt_with_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    install(monkeypatch)
    found = bench(tmp_path)
    tensorrt.check(found)
    assert found.record["failed"] == []
    assert found.record["cases"] == 1
    tensorrt.timing(found)
    assert {row["engine"] for row in found.record["rows"] if row["tokens_per_second"]} == {"runtime", "TensorRT"}


def test_tensorrt_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("export.tensorrt.build.missing", lambda: "TensorRT is not installed")
    with pytest.raises(MissingPeerError, match="TensorRT is not installed"):
        tensorrt.timing(bench(tmp_path))


# ---------------------------------------------------------------- the device's clock
class Device:
    """CUDA's events, graphs and synchronization, made up: a call takes 3 ms, a replay 2 ms of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
        self.milliseconds, self.captures, self.replays, self.capturing = 0.0, captures, 0, False
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = device.milliseconds

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Graph:
            def replay(self) -> None:
                device.replays += 1
                device.milliseconds += 2.0 * device.calls

        class Capture:
            def __init__(self, graph: Graph) -> None:
                if not captures:
                    raise RuntimeError("operation not permitted when stream is capturing")

            def __enter__(self) -> None:
                device.calls, device.capturing = 0, True

            def __exit__(self, *_: object) -> None:
                device.capturing = False

        for name, value in (("Event", Event), ("CUDAGraph", Graph), ("graph", Capture)):
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def call(self) -> None:
        if self.capturing:
            self.calls += 1
        else:
            self.milliseconds += 3.0


@pytest.mark.parametrize(("captures", "seconds"), [(True, 2e-3), (False, 3e-3)])
def test_a_gpu_is_timed_by_events_around_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: bool, seconds: float
) -> None:
    device, found = Device(monkeypatch, captures), Bench(False, 600, tmp_path / "record.json", tmp_path)
    assert found.seconds([device.call] * 4) == pytest.approx(seconds)
    assert (device.replays > 10) == captures


def test_weights_in_turn_exceed_twice_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Bench(False, 600, tmp_path / "record.json", tmp_path)
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert [found.copies(size) for size in (1 << 10, 8 << 20, 60 << 20, 1 << 30)] == [64, 14, 3, 2]


# ---------------------------------------------------------------- what checks notice
@pytest.mark.parametrize("error", [0.5, math.nan, math.inf])
def test_a_case_beyond_its_limit_fails(tmp_path: Path, error: float) -> None:
    found = bench(tmp_path)
    found.case("good, of its kind", 0.01, 0.1)
    found.case("bad, of its kind", error, 0.1)
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["cases"] == 2
    assert [reason.split(":")[0] for reason in record["failed"]] == ["bad, of its kind"]


def test_a_kernel_that_is_not_the_same_twice_fails() -> None:
    expected, calls = torch.ones(4, dtype=torch.float64), []

    def run() -> torch.Tensor:
        calls.append(1)
        return torch.ones(4) + 1e-4 * len(calls)

    assert math.isnan(error_of(Case("random", run, expected, 1e-2)))
    assert error_of(Case("steady", lambda: torch.ones(4) + 1e-4, expected, 1e-2)) == pytest.approx(1e-4, rel=0.01)


def test_a_wrong_engine_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llama.CudaEngine.step
    monkeypatch.setattr(llama.CudaEngine, "step", lambda self, *args: step(self, *args).flip(-1))
    found = bench(tmp_path)
    llama.check(found)
    assert [reason.split(":")[0] for reason in found.record["failed"]] == ["logits, bf16", "logits, w4"]


def test_ours_that_raises_is_a_failure_and_a_peers_is_not(tmp_path: Path) -> None:
    found, row = bench(tmp_path), {}

    def breaks() -> float:
        raise RuntimeError("out of memory\nand a long trace")

    def missing() -> float:
        raise ModuleNotFoundError("No module named 'gemlite'")

    found.ours(row, "w4a16", breaks)
    found.peer(row, "tinygemm", breaks)
    found.peer(row, "gemlite", missing)
    assert row == {"w4a16": None, "tinygemm": None, "gemlite": None, "tinygemm_reason": "RuntimeError: out of memory"}
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["failed_peers"] == {"tinygemm": "RuntimeError: out of memory"}
    assert found.record["peer_figures"] == 0
    found.peer(row, "marlin", lambda: 1.0)
    assert (row["marlin"], found.record["peer_figures"]) == (1.0, 1)
    assert found.record["failed"] == ["w4a16: RuntimeError: out of memory"]
    assert list(found.record["missing_peers"]) == ["gemlite"]


class VLLM:
    """The stand-in for vLLM in this process, with what its engines are asked for; some of them are rejected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rejected: str) -> None:
        spec = importlib.util.spec_from_file_location("vllm", STAND_INS / "vllm" / "__init__.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        engine, self.shares = module.LLM, {}

        def build(path: str, *, gpu_memory_utilization: float, **options: Any) -> Any:
            weights = Path(path).name.split("-")[-1]
            self.shares[weights] = gpu_memory_utilization
            if weights in rejected:
                raise ValueError(f"{weights} is not supported")
            return engine(path, **options)

        monkeypatch.setattr(module, "LLM", build)
        monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize("rejected", [(), ("w4",), ("bf16",), ("w4", "bf16")])
def test_a_model_that_vllm_rejects_costs_its_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejected: tuple[str, ...]
) -> None:
    VLLM(monkeypatch, *rejected)
    found = bench(tmp_path)
    vllm.timing(found)
    figures = {row["engine"] for row in found.record["rows"] if row.get("step_ms") is not None}
    assert figures == {f"vllm {weights}" for weights in ("w4", "bf16") if weights not in rejected}
    assert found.record["failed_peers"] == {
        f"vllm {weights}, model": f"ValueError: {weights} is not supported" for weights in rejected
    }
    (section,) = (section for section in SECTIONS if section.name == "vllm")
    outcome = gpu.judge(section, "timing", found.record, 0, False, tmp_path / "log")
    assert outcome["status"] == ("incomplete" if len(rejected) == 2 else "done")


def test_a_model_that_gpt_fast_rejects_costs_its_figures_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(bench: Bench, shape: dict[str, int], packed: bool) -> object:
        if not packed:
            raise RuntimeError("no")
        return object()

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(gpt_fast, "built", built)
    monkeypatch.setattr(gpt_fast, "step_ms", lambda *_: 1.0)
    monkeypatch.setattr(gpt_fast, "decode_cells", lambda _: ((1, 8), (2, 8)))
    found = Bench(True, 600, tmp_path / "record.json", tmp_path, STAND_INS / "gpt_fast")
    gpt_fast.timing(found)
    assert [(row["engine"], row["batch"], row.get("step_ms")) for row in found.record["rows"]] == [
        ("gpt-fast bf16", 1, None), ("gpt-fast w4", 1, 1.0), ("gpt-fast w4", 2, 1.0),
    ]  # fmt: skip
    assert found.record["failed_peers"] == {"gpt-fast bf16, model": "RuntimeError: no"}


def test_models_fit_in_their_share_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, total = VLLM(monkeypatch), 25.2e9
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (llama.NEEDS, total))
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
        free = Bench(False, 600, tmp_path / "record.json", tmp_path).free_share()
    assert free == pytest.approx(llama.NEEDS / total)
    monkeypatch.setattr(Bench, "free_share", lambda self: free)
    vllm.timing(bench(tmp_path))
    with torch.device("meta"):
        model = llama.dense_model(llama.SHAPES["8b"], torch.device("meta"))
    table = model.get_input_embeddings().weight.numel()
    linear = sum(p.numel() for p in model.parameters()) - 2 * table
    cache = 2 * 2 * 32 * 8 * 128 * 16384  # of one sequence, without which vLLM does not start
    weights = {"bf16": 2 * linear + 4 * table, "w4": linear * (4 + 16 / 128) / 8 + 4 * table}
    for name, size in weights.items():
        assert engines.shares[name] * total > size + cache + 1e9, name  # and what computes


def test_cells_without_time_are_recorded(tmp_path: Path) -> None:
    found = Bench(True, 2.0, tmp_path / "record.json", tmp_path)
    assert found.enough("short", 1.0)
    assert not found.enough("long", 60.0)
    assert found.record["left_out"] == ["long: no time left"]


def test_sections_are_named_once() -> None:
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
    assert all(isinstance(section, Section) and section.timing > 0 for section in SECTIONS)
