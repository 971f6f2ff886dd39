"""Trial: runs the recipe with its values and returns the measurements. Every executor runs `run_trial` and nothing else.

`python -m compress.sweeps.trial JOB RESULT` is one trial as a process: it reads a job from one file and writes the result to another.
It ends at once when its stdin does, so that no trial outlives a sweep that was killed.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import ArtifactError, CompressError, RequestError, ResourceError
from runtime.system.memory import peak_bytes


def run_trial(job: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out one trial.

    Args:
        job: JSON-able: `base` (`BaseRecipe.to_plain`), `values` (by dotted keys), `output` (absolute, of the artifact; an interrupted
            run there continues), `log`, `directory` (where relative names of the recipe are looked up), `max_memory` (bytes, or None),
            `device`, `threads`.

    Returns:
        JSON-able fields of a `Trial`: `status` and with it `metrics` or `error`. Errors of a trial are returned, not raised.
    """
    start = time.monotonic()
    try:
        found = _apply(job)
    except CompressError as error:
        # Errors of the machine are not errors of the values: another time the trial may succeed.
        refused = isinstance(error, RequestError) and not isinstance(error, (ResourceError, ArtifactError))
        found = {"status": "refused" if refused else "failed", "error": str(error)}
    except MemoryError:
        found = {"status": "failed", "error": "out of memory"}
    except Exception as error:
        with Path(job["log"]).open("a", encoding="utf-8") as log:
            log.write(traceback.format_exc())
        first = (str(error).strip().splitlines() or [""])[0]
        found = {"status": "failed", "error": f"unexpected {type(error).__name__}: {first}; {job['log']} shows where"}
    return found | {
        "seconds": round(time.monotonic() - start, 3),
        "host": platform.node(),
        "threads": job["threads"],
        "peak_memory": peak_bytes(),
    }


def _apply(job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        os.chdir(job["directory"])
        Path(job["output"]).parent.stat()
    except OSError as error:
        text = f"{error.filename} does not exist on {platform.node()}: all machines of a sweep need the folders of the first"
        raise CompressError(text) from None
    import torch

    from compress.evaluate.limits import exceeded
    from compress.run.run import LimitError, apply
    from compress.sweeps.base import BaseRecipe
    from compress.sweeps.metrics import of_artifact, of_source

    torch.set_num_threads(job["threads"])
    recipe = BaseRecipe.from_plain(job["base"]).at(job["values"])
    try:
        # overwrite: a trial with a damaged record may have left an artifact there
        artifact = apply(
            recipe, output=Path(job["output"]), resume=True, overwrite=True, device=job["device"], quiet=True,
            max_memory=job["max_memory"],
        )  # fmt: skip
    except LimitError as error:
        artifact = error.result
    return {
        "status": "finished",
        "metrics": finite(of_artifact(artifact.manifest)),
        "source": finite(of_source(artifact.manifest)),
        "limits": exceeded(artifact.metrics),
        "text": artifact.metrics.get("text", ""),
        "warnings": artifact.warnings,
    }


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """The values, with None for NaN and infinities, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def main(arguments: list[str]) -> int:
    """Run the trial of a job file, write its result file (two paths) and return exit code 0."""
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    job_file, result_file = (Path(argument) for argument in arguments)
    found = run_trial(json.loads(job_file.read_text(encoding="utf-8")))
    from compress.core.files import write_json

    write_json(result_file, found)
    return 0


def _end_with_the_sweep() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)  # finished blocks are on the disk, and a resume continues there


if __name__ == "__main__":
    from compress.core.stopping import stoppable

    with stoppable():
        sys.exit(main(sys.argv[1:]))
