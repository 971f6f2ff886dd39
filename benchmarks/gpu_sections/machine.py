"""Machine, versions and sources of a run, printed as one JSON object: results of other ones are not mixed with it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0:1] = [str(ROOT / "benchmarks"), str(ROOT)]
ROOMS = ("benchmarks", "compress", "export", "runtime", "tests/helpers")


def machine(dry: bool) -> dict[str, Any]:
    """What figures depend on.

    Raises:
        SystemExit: there is no GPU, and this is no dry run.
    """
    import torch
    from where import cpu_name

    found: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "triton": version("triton"), "transformers": version("transformers"),
    }  # fmt: skip
    if dry:
        return found | {"device": "cpu", "cpu": cpu_name()}
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; --dry-run needs none")
    gpu = torch.cuda.get_device_properties(0)
    return found | {
        "device": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory,
        "multiprocessors": gpu.multi_processor_count, "l2_cache_bytes": gpu.L2_cache_size,
    }  # fmt: skip


def version(package: str) -> str | None:
    """Of what is installed; None: it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sources() -> str:
    """SHA-256 over the code that is measured, whether or not it is committed."""
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".c", ".h", ".yaml"):
                found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    from where import commit

    print(json.dumps({"machine": machine("--dry-run" in sys.argv), "commit": commit(), "sources": sources()}))
