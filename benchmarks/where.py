"""Where and what was measured: the CPU, its memory, the commit. Nothing heavy is imported."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def cpu_facts() -> dict[str, str]:
    """The first processor in /proc/cpuinfo; empty where there is none."""
    found: dict[str, str] = {}
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    return found


def cpu_name() -> str:
    """What the CPU calls itself."""
    return cpu_facts().get("model name") or platform.processor() or "unknown"


def memory_gb() -> float:
    """Memory of the machine; 0 where nobody says."""
    return next(
        (round(int(line.split()[1]) * 1024 / 1e9, 1) for line in _lines("/proc/meminfo") if "MemTotal" in line), 0.0
    )


def commit() -> str:
    """The commit that ours was measured at; "+" where the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return (
        subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "unknown"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
