"""sweep.json and table.csv: the values and results of all trials."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from compress.core.files import write_text
from compress.core.version import VERSION
from compress.sweeps.directory import RESULTS, TRIALS, SweepDirectory
from compress.sweeps.labels import short_names
from compress.sweeps.metrics import METRICS
from compress.sweeps.models import Sweep
from compress.sweeps.records import Trial, best, front

SCHEMA_VERSION = 1


def summary(sweep: Sweep, directory: SweepDirectory, source: dict[str, float | None], seconds: float) -> dict[str, Any]:
    """The content of sweep.json.

    Args:
        source: numbers of the model that is compressed.
        seconds: that this run of the sweep has taken.
    """
    from compress.run.manifest import toolchain

    trials = directory.in_order
    on_front = front(trials, sweep)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": sweep.file.name,
        "compress_version": VERSION,
        "toolchain": toolchain(),
        "sweep": sweep.resolved(),
        "keys": short_names(list(sweep.vary)),
        "objectives": [
            {"name": name, "better": METRICS[name].better, "label": METRICS[name].label}
            for name in sweep.file.objectives
        ],
        "source": source,
        "counts": {
            status: sum(trial.status == status for trial in trials)
            for status in ("finished", "failed", "refused", "proposed")
        },
        "text": next((trial.text for trial in trials if trial.text), ""),
        "pareto": on_front,
        "best": best(trials, sweep),
        "trials": [_row(trial, sweep, directory, on_front) for trial in trials],
        "seconds": round(seconds, 3),
    }


_ROW = (
    "number", "values", "status", "error", "metrics", "pareto", "broken", "speed_error", "artifact", "seconds", "peak_memory", "host",
    "threads", "warnings",
)  # fmt: skip


def _row(trial: Trial, sweep: Sweep, directory: SweepDirectory, on_front: list[int]) -> dict[str, Any]:
    finished = trial.status == "finished"
    there = finished and directory.artifact(trial.number).is_dir()
    found = vars(trial) | {
        "pareto": trial.number in on_front,
        "broken": trial.broken(sweep) if finished else [],
        "artifact": f"{TRIALS}/{directory.name(trial.number)}" if there else None,
    }
    return {name: found[name] for name in _ROW}


def write_results(result: dict[str, Any], path: Path) -> list[Path]:
    """Write sweep.json and table.csv into the sweep's directory."""
    # Keys in the order of the sweep file; those of records are sorted.
    write_text(path / RESULTS, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    write_text(path / "table.csv", _table(result))
    return [path / RESULTS, path / "table.csv"]


def _table(result: dict[str, Any]) -> str:
    names = [name for name in METRICS if any(name in trial["metrics"] for trial in result["trials"])]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *result["keys"], "status", *names, "pareto", "seconds", "artifact", "note"])
    for trial in result["trials"]:
        values = [trial["values"].get(key) for key in result["keys"]]
        numbers = [trial["metrics"].get(name) for name in names]
        tail = [int(trial["pareto"]), trial["seconds"], trial["artifact"], note(trial)]
        writer.writerow([trial["number"], *values, trial["status"], *numbers, *tail])
    return text.getvalue()


def note(trial: dict[str, Any]) -> str:
    """Why a trial is on no front, if there is another reason than better trials."""
    if trial["status"] in ("failed", "refused"):
        return f"{trial['status']}: {trial['error']}"
    if trial["speed_error"]:
        return f"speed not measured: {trial['speed_error']}"
    return "; ".join(trial["broken"])


def ranked(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The trials, best in the first objective first; those without a number last."""
    first = result["objectives"][0]
    sign = 1.0 if first["better"] == "min" else -1.0

    def order(trial: dict[str, Any]) -> tuple[bool, float, int]:
        value = trial["metrics"].get(first["name"])
        return (value is None, sign * (value or 0.0), trial["number"])

    return sorted(result["trials"], key=order)
