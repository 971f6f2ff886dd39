#!/usr/bin/env python
"""Everything that only a GPU can tell, in one command: checks first, then figures beside peers of the same run, in one JSON.

    python benchmarks/gpu.py [--minutes 25] [--output benchmarks/results/gpu.json]     the first GPU, no network
    python benchmarks/gpu.py --only kernels llama --again kernels                      some sections, one of them once more
    python benchmarks/gpu.py --dry-run                                                 the same code on a CPU: tiny, interpreted

Sections are those of `gpu_sections`. Each part of a section (check, timing) runs in a process of its own, so that a fault of the device or
a lack of memory costs that part alone, and is in the JSON as soon as it ends. All checks come before all timings; a section whose check
fails or is left out is not timed. The minutes are shared by what parts are expected to take; what is left out for lack of time is recorded.
A rerun on the same machine and sources goes on with what is not finished. Peers are used where they are installed: torchao, gemlite, vLLM
(Marlin, Machete, whole models), TensorRT, and gpt-fast from `--gpt-fast CHECKOUT`.

Exit code 0: every check passed or lacks its peer, and no timing failed (peers that raise and timings left out or incomplete do not
count, but a peer that kills its process or takes too long does); 1: not so; 2: no GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_sections import MISSING, SECTIONS, Section
from gpu_sections.files import write_json
from gpu_sections.summary import summary
from measure import last_error, measure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NOTE = "dry run on a CPU: tiny shapes, interpreted kernels; no figure in this file is a measurement"
LEAST = 10.0  # seconds: a part with less is left out
STRETCH = 1.5  # a part is ended when it takes so many times its share
PARTS = ("check", "timing")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
Outcome = dict[str, Any]
Launch = Callable[[Section, str, float, float], Outcome]  # section, part, its share of the time, when it is ended


@dataclass
class Results:
    """The JSON, which is replaced after every part."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def open(cls, path: Path, key: dict[str, Any], dry: bool) -> Results:
        """Those of an earlier run of the same machine and sources, moved aside or not, or new ones; others are moved aside."""
        content: dict[str, Any] = {"dry_run": dry, **({"note": NOTE} if dry else {}), **key, "sections": {}}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            if all(found.get(name) == content[name] for name in ("dry_run", "machine", "sources")):
                return cls(path, found)
            aside = cls.aside(path, found)
            path.replace(aside)
            say(f"{path} is of another machine or other sources: it is {aside.name} now")
        earlier = cls.aside(path, content)
        if earlier.exists():
            earlier.replace(path)
            say(f"{earlier.name} is of this machine and these sources: it is {path} again")
            return cls(path, json.loads(path.read_text(encoding="utf-8")))
        return cls(path, content)

    @staticmethod
    def aside(path: Path, content: dict[str, Any]) -> Path:
        """Where results lie while `path` is of others: the name has their sources and machine, and a hash of all that it is known by."""
        machine = content.get("machine", {})
        device = re.sub(r"\W+", "-", machine.get("device", "other"))
        known = json.dumps([machine, content.get("dry_run")], sort_keys=True).encode()
        name = f"{path.stem}_{content.get('sources', 'other')}_{device}_{hashlib.sha256(known).hexdigest()[:8]}"
        return path.with_name(name + path.suffix)

    def of(self, section: Section, part: str) -> Outcome | None:
        """What is known of a part."""
        found: Outcome | None = self.content["sections"].get(section.name, {}).get(part)
        return found

    def put(self, section: Section, part: str, outcome: Outcome) -> None:
        """Record a part, on disk too."""
        dry = {"dry_run": True} if self.content["dry_run"] else {}
        self.content["sections"].setdefault(section.name, {})[part] = dry | outcome
        write_json(self.path, self.content)

    def forget(self, names: Sequence[str]) -> None:
        """These sections will be repeated."""
        for name in names:
            self.content["sections"].pop(name, None)


def finished(outcome: Outcome | None) -> bool:
    """Whether a part need not be repeated. What failed, or was left out, is tried again."""
    return outcome is not None and outcome["status"] in ("passed", "done")


def run(results: Results, sections: Sequence[Section], seconds: float, launch: Launch) -> None:
    """All checks, then all timings, within so many seconds."""
    end = time.monotonic() + seconds
    jobs = [(part, one, getattr(one, part)) for part in PARTS for one in sections if getattr(one, part) > 0]
    jobs = [job for job in jobs if not finished(results.of(job[1], job[0]))]
    for number, (part, section, expected) in enumerate(jobs):
        remaining = end - time.monotonic()
        share = remaining * expected / sum(job[2] for job in jobs[number:])
        outcome = why_not(results, section, part, share)
        if outcome is None:
            say(f"{section.name}: {part}, up to {share:.0f} s")
            started = time.monotonic()
            outcome = launch(section, part, share, min(share * STRETCH, remaining))
            outcome["seconds"] = round(time.monotonic() - started, 1)
        results.put(section, part, outcome)
        say(f"{section.name}: {part} {outcome['status']}" + (f": {outcome['reason']}" if "reason" in outcome else ""))


def why_not(results: Results, section: Section, part: str, share: float) -> Outcome | None:
    """The outcome of a part that is not run; None: it is."""
    check = results.of(section, "check") if part == "timing" and section.check > 0 else None
    if check is not None and check["status"] == "missing peer":
        return {"status": "missing peer", "reason": check["reason"]}
    if check is not None and check["status"] in ("failed", "left out"):
        return {
            "status": "left out",
            "reason": f"its check {'failed' if check['status'] == 'failed' else 'was left out'}",
        }
    if share < LEAST:
        return {"status": "left out", "reason": f"its share of the time left is {max(share, 0):.0f} s"}
    return None


def launcher(options: argparse.Namespace, work: Path) -> Launch:
    """Starts a part in a process of its own and reads what it recorded."""

    def launch(section: Section, part: str, share: float, limit: float) -> Outcome:
        work.mkdir(parents=True, exist_ok=True)
        log, file = work / f"{section.name}.{part}.log", work / f"{section.name}.{part}.json"
        file.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "gpu_sections" / "worker.py"), section.home(), part]
        command += ["--result", str(file), "--work", str(work), "--seconds", str(share)]
        command += ["--dry-run"] if options.dry_run else []
        command += ["--gpt-fast", str(options.gpt_fast)] if options.gpt_fast else []
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = measure(command, log, os.environ | ENVIRONMENT | {"PYTHONPATH": paths}, limit)
        found: Outcome = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return judge(section, part, found, done.returncode, done.timed_out, log)

    return launch


def judge(section: Section, part: str, found: Outcome, code: int, timed_out: bool, log: Path) -> Outcome:
    """The outcome of a process from what it recorded and how it ended."""
    facts = found.get("facts", {})
    reason = facts.pop("reason", None)
    kept = {name: value for name, value in found.items() if value}
    if code == MISSING:
        return {"status": "missing peer", "reason": reason, **kept}
    if timed_out:
        return {"status": "failed", "reason": "it took longer than its time and was ended", **kept}
    if code < 0:
        return {"status": "failed", "reason": f"ended by signal {-code}: {last_error(log, 1)}", **kept}
    if code > 0:
        return {"status": "failed", "reason": reason or last_error(log, 1), **kept}
    if found.get("failed"):
        return {"status": "failed", "reason": f"{len(found['failed'])} failed, first {found['failed'][0]}", **kept}
    if part == "check" and not found.get("cases") and not found.get("left_out"):
        return {"status": "failed", "reason": "it checked nothing", **kept}
    if part == "timing" and section.for_peer and not found.get("peer_figures"):
        return {"status": "incomplete", "reason": "no figure of the peer", **kept}
    if found.get("left_out"):
        return {"status": "incomplete", "reason": f"{len(found['left_out'])} left out for lack of time", **kept}
    return {"status": "passed" if part == "check" else "done", **kept}


def exit_code(results: Results, sections: Sequence[Section]) -> int:
    """0: every check passed, or cannot run without a peer, and no timing failed."""
    checks = [results.of(section, "check") for section in sections if section.check > 0]
    timings = [results.of(section, "timing") for section in sections]
    passed = all(found is not None and found["status"] in ("passed", "missing peer") for found in checks)
    return 0 if passed and not any(found is not None and found["status"] == "failed" for found in timings) else 1


def ask_machine(dry: bool) -> subprocess.CompletedProcess[str]:
    """Its process, which says what results are known by."""
    command = [sys.executable, str(HERE / "gpu_sections" / "machine.py"), *(["--dry-run"] if dry else [])]
    return subprocess.run(command, capture_output=True, text=True)


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def main(given: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    """Command line."""
    names = [section.name for section in sections]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--again", nargs="+", choices=names, default=[], metavar="SECTION", help="repeat these")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny shapes, interpreted kernels")
    parser.add_argument("--output", type=Path, help="benchmarks/results/gpu.json; of a dry run build/gpu_dry_run.json")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu", help="checkpoints, artifacts and logs")
    parser.add_argument("--gpt-fast", type=Path, help="a checkout of gpt-fast, to compare with")
    options = parser.parse_args(given)
    output = options.output or (
        ROOT / "build" / "gpu_dry_run.json" if options.dry_run else HERE / "results" / "gpu.json"
    )
    asked = ask_machine(options.dry_run)
    if asked.returncode:
        say(asked.stderr.strip().splitlines()[-1])
        return 2
    key = json.loads(asked.stdout)
    output.parent.mkdir(parents=True, exist_ok=True)
    results = Results.open(output, key, options.dry_run)
    results.forget(options.again)
    chosen = [section for section in sections if section.name in options.only]
    run(results, chosen, 60 * options.minutes, launcher(options, options.work / key["sources"]))
    print(summary(results.content, ROOT))
    print(f"{output} has every figure, {options.work / key['sources']} the logs")
    return exit_code(results, chosen)


if __name__ == "__main__":
    sys.exit(main())
