"""`benchmarks/gpu.py`: order, budget, resumption, failures and exit codes, with made-up sections."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import pytest
from gpu_sections import Section

KEY = {"machine": {"device": "made up"}, "commit": "abc", "sources": "123"}
ONE, TWO, PEER = Section("one", 30, 60), Section("two", 30, 60), Section("peer", 0, 60, for_peer=True)
SECTIONS = (ONE, TWO, PEER)


class Workers:
    """A `gpu.Launch` that starts nothing; `outcomes`: of parts that do not end well, by "section part"."""

    def __init__(self, outcomes: dict[str, dict[str, Any]] | None = None) -> None:
        self.outcomes = outcomes or {}
        self.calls: list[str] = []
        self.shares: list[float] = []
        self.limits: list[float] = []

    def __call__(self, section: Section, part: str, share: float, limit: float) -> dict[str, Any]:
        name = f"{section.name} {part}"
        self.calls.append(name)
        self.shares.append(share)
        self.limits.append(limit)
        return dict(self.outcomes.get(name, {"status": "passed" if part == "check" else "done"}))


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., gpu.Results]:
    return lambda **changes: gpu.Results.open(tmp_path / "gpu.json", {**KEY, **changes}, dry=False)


def test_all_checks_come_before_any_timing(results: Any) -> None:
    workers, found = Workers(), results()
    gpu.run(found, SECTIONS, 1000, workers)
    assert workers.calls == ["one check", "two check", "one timing", "two timing", "peer timing"]
    assert gpu.exit_code(found, SECTIONS) == 0


def test_each_part_is_on_disk_before_the_next_begins(results: Any) -> None:
    found, seen = results(), []

    def launch(section: Section, part: str, share: float, limit: float) -> dict[str, Any]:
        content = json.loads(found.path.read_text()) if found.path.exists() else {"sections": {}}
        seen.append(sum(len(parts) for parts in content["sections"].values()))
        return {"status": "passed" if part == "check" else "done"}

    gpu.run(found, SECTIONS, 1000, launch)
    assert seen == [0, 1, 2, 3, 4]


def test_a_rerun_skips_what_is_finished(results: Any) -> None:
    broken = {
        "two timing": {"status": "failed", "reason": "no"},
        "peer timing": {"status": "missing peer", "reason": "no"},
    }
    first = results()
    gpu.run(first, SECTIONS, 1000, Workers(broken))
    assert gpu.exit_code(first, SECTIONS) == 1
    again, workers = results(), Workers()
    gpu.run(again, SECTIONS, 1000, workers)
    assert workers.calls == ["two timing", "peer timing"]
    assert gpu.exit_code(again, SECTIONS) == 0
    repeated, workers = results(), Workers()
    repeated.forget(["one"])
    gpu.run(repeated, SECTIONS, 1000, workers)
    assert workers.calls == ["one check", "one timing"]


@pytest.mark.parametrize("changes", [{"sources": "456"}, {"machine": {"device": "another"}}])
def test_results_of_others_are_moved_aside(results: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    gpu.run(results(), SECTIONS, 1000, Workers())
    workers, found = Workers(), results(**changes)
    gpu.run(found, SECTIONS, 1000, workers)
    assert len(workers.calls) == 5
    (path,) = tmp_path.glob("gpu_123_made-up_*.json")
    aside = json.loads(path.read_text())
    assert (aside["machine"], aside["sources"]) == (KEY["machine"], KEY["sources"])


def test_machines_in_turn_lose_nothing(results: Any, tmp_path: Path) -> None:
    ours, other = {}, {"machine": KEY["machine"] | {"torch": "another"}}  # the same device and sources
    gpu.run(results(**ours), [ONE], 1000, Workers())
    gpu.run(results(**other), [TWO], 1000, Workers())
    for turn in (ours, other) * 2:
        workers = Workers()
        gpu.run(results(**turn), [TWO if turn else ONE], 1000, workers)
        assert workers.calls == [], "it goes on with what was moved aside"
    assert len(list(tmp_path.glob("gpu*.json"))) == 2


def test_a_failed_check_costs_its_own_timing_alone(results: Any) -> None:
    workers, found = Workers({"one check": {"status": "failed", "reason": "wrong numbers"}}), results()
    gpu.run(found, SECTIONS, 1000, workers)
    assert workers.calls == ["one check", "two check", "two timing", "peer timing"]
    assert found.of(ONE, "timing") == {"status": "left out", "reason": "its check failed"}
    assert gpu.exit_code(found, SECTIONS) == 1


def test_a_missing_peer_is_no_failure(results: Any) -> None:
    outcome = {"status": "missing peer", "reason": "TensorRT is not installed"}
    workers, found = Workers({"one check": outcome, "peer timing": outcome}), results()
    gpu.run(found, SECTIONS, 1000, workers)
    assert "one timing" not in workers.calls
    assert found.of(ONE, "timing") == outcome
    assert gpu.exit_code(found, SECTIONS) == 0


@pytest.mark.parametrize("status", ["incomplete", "left out"])
def test_a_check_that_was_not_finished_is_not_passed(results: Any, status: str) -> None:
    workers, found = Workers({"two check": {"status": status, "reason": "no time"}}), results()
    gpu.run(found, SECTIONS, 1000, workers)
    assert gpu.exit_code(found, SECTIONS) == 1
    assert ("two timing" in workers.calls) == (status == "incomplete"), (
        "what was checked so far is no reason not to time"
    )


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("incomplete", 0), ("left out", 0), ("missing peer", 0)])
def test_of_timings_only_a_failed_one_counts(results: Any, status: str, code: int) -> None:
    found = results()
    gpu.run(found, SECTIONS, 1000, Workers({"peer timing": {"status": status, "reason": "no"}}))
    assert gpu.exit_code(found, SECTIONS) == code


def test_time_is_shared_by_what_parts_are_expected_to_take(results: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    class Slow(Workers):
        def __call__(self, section: Section, part: str, share: float, limit: float) -> dict[str, Any]:
            now[0] += share / 2 if section is ONE else share
            return super().__call__(section, part, share, limit)

    workers = Slow()
    gpu.run(results(), SECTIONS, 240, workers)
    assert workers.shares[0] == pytest.approx(30)
    assert workers.shares[1] == pytest.approx(225 * 30 / 210)  # what the first left is everybody's
    assert now[0] <= 240
    assert workers.limits[0] == pytest.approx(1.5 * 30), "a part may take more than its share"
    assert workers.limits[-1] == workers.shares[-1], "but never more than is left"


def test_what_time_does_not_suffice_for_is_left_out_and_said(
    results: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])

    class Overrun(Workers):
        def __call__(self, section: Section, part: str, share: float, limit: float) -> dict[str, Any]:
            now[0] += 90
            return super().__call__(section, part, share, limit)

    found, workers = results(), Overrun()
    gpu.run(found, SECTIONS, 185, workers)
    assert workers.calls == ["one check", "two check"]
    said = capsys.readouterr().err
    for section in SECTIONS:
        outcome = found.of(section, "timing")
        assert outcome is not None
        assert outcome["status"] == "left out"
        assert f"{section.name}: timing left out: its share of the time left" in said
    assert gpu.exit_code(found, SECTIONS) == 0, "every check passed"


@pytest.mark.parametrize(
    ("found", "code", "timed_out", "status", "reason"),
    [
        ({"cases": 2}, 0, False, "passed", None),
        ({}, 0, False, "failed", "checked nothing"),
        ({"cases": 2, "failed": ["matvec: 0.5"]}, 0, False, "failed", "matvec"),
        ({"cases": 2, "left_out": ["w8a8"]}, 0, False, "incomplete", "lack of time"),
        ({"cases": 2, "facts": {"reason": "ValueError: no"}}, 1, False, "failed", "ValueError: no"),
        ({"cases": 2}, -6, False, "failed", "signal 6: an illegal memory access"),
        ({"cases": 2}, -9, True, "failed", "longer than its time"),
        ({"facts": {"reason": "vLLM is not installed"}}, gpu.MISSING, False, "missing peer", "vLLM is not installed"),
    ],
)
def test_how_a_process_ended(
    tmp_path: Path, found: dict[str, Any], code: int, timed_out: bool, status: str, reason: str | None
) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA error\nan illegal memory access\n")
    outcome = gpu.judge(ONE, "check", found, code, timed_out, log)
    assert outcome["status"] == status
    assert (reason is None) == ("reason" not in outcome)
    assert reason is None or reason in outcome["reason"]
    assert outcome.get("cases") == found.get("cases"), "what was recorded before is kept"


@pytest.mark.parametrize(
    ("section", "figures", "status"), [(PEER, 0, "incomplete"), (PEER, 1, "done"), (ONE, 0, "done")]
)
def test_a_section_for_a_peer_needs_a_figure_of_it(tmp_path: Path, section: Section, figures: int, status: str) -> None:
    found = {"rows": [{"step_ms": None}], "failed_peers": {"vllm": "ValueError: no"}, "peer_figures": figures}
    outcome = gpu.judge(section, "timing", found, 0, False, tmp_path / "log")
    assert outcome["status"] == status
    assert outcome["failed_peers"] == {"vllm": "ValueError: no"}


SOURCES = {
    "aborts": "import os\ndef check(bench):\n    bench.case('first', 0.0, 1.0)\n    os.abort()",
    "raises": "def check(bench):\n    raise ValueError('a sentence\\nand more')",
    "sleeps": "import time\ndef check(bench):\n    time.sleep(600)",
    "works": "def check(bench):\n    bench.case('first', 0.0, 1.0)\ndef timing(bench):\n    bench.add({'seconds': 1.0})",
}


@pytest.mark.slow
@pytest.mark.usefixtures("warm_workers")
def test_processes_that_fail_cost_their_section_alone(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in SOURCES.items():
        (tmp_path / f"section_{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "STRETCH", 0.1)  # of 35 s for the one that sleeps, and of minutes for the others
    sections = [
        Section(name, 4 if name == "sleeps" else 100, 100 * (name == "works"), f"section_{name}") for name in SOURCES
    ]
    command = ["--dry-run", "--output", str(tmp_path / "out.json"), "--work", str(tmp_path / "work"), "--minutes", "30"]
    assert gpu.main(command, sections) == 1
    content = json.loads((tmp_path / "out.json").read_text())
    checks = {name: parts["check"] for name, parts in content["sections"].items()}
    assert {name: check["status"] for name, check in checks.items()} == {
        "aborts": "failed", "raises": "failed", "sleeps": "failed", "works": "passed",
    }  # fmt: skip
    assert checks["aborts"]["cases"] == 1
    assert "signal 6" in checks["aborts"]["reason"]
    assert checks["raises"]["reason"] == "ValueError: a sentence"
    assert "longer" in checks["sleeps"]["reason"]
    assert checks["sleeps"]["seconds"] < 5
    assert content["sections"]["works"]["timing"]["rows"] == [{"seconds": 1.0}]
    assert content["dry_run"]
    assert all(part["dry_run"] for parts in content["sections"].values() for part in parts.values())
    printed = capsys.readouterr().out
    assert "raises, check: ValueError: a sentence" in printed
    # The same sources once more: what passed is not repeated, so the exit code is that of what is asked for.
    assert gpu.main([*command, "--only", "works"], sections) == 0
    assert "works: check" not in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["--output", str(tmp_path / "out.json"), "--work", str(tmp_path)]) == 2
    assert "--dry-run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
