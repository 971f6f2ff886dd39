"""Run record of an artifact (`run.json`): date, command, machine, time and memory of each run that wrote it, and sample outputs.

It is no part of what the manifest hashes: equal runs give equal artifacts, and other times.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from compress.core.files import read_object, write_text
from compress.core.progress import memory_bytes
from compress.core.run_directory import RECORD
from compress.core.version import VERSION
from compress.model.context import Context
from compress.report import write_report
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError, RequestError, ResourceError
from runtime.system import processes
from runtime.system.device import choose_device
from runtime.system.memory import available_bytes
from runtime.system.sizes import size

SAMPLE_TOKENS = 48
_SAMPLES = {"prompts", "tokens", "source", "artifact", "left_out", "engine"}
_PROMPTS, _PROMPT_TOKENS = (
    3,
    24,
)  # where the recipe names no prompt: how many beginnings of held-out windows, and how long
#: A loaded model takes more than its tensors: buffers of a step, and weights that are being repacked.
_LOADED = 1.2
_SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)|\bhf_\w{8,}|(?i:(?<=token=)|(?<=secret=)|(?<=password=)|(?<=api_key=))\S+")


def shown_command(arguments: Sequence[str]) -> str:
    """The command line as a shell takes it, with passwords and access tokens replaced by `***`."""
    return shlex.join(["compress", *(_SECRET.sub("***", argument) for argument in arguments)])


@dataclass
class RunRecord:
    """Wall-clock seconds of a run by phase, noted in the output after every phase.

    Attributes:
        device: "cpu", "cuda", "cuda:1". processes: how many share the run.
        command: the command line that runs; None: called from Python.
        seconds: {phase: seconds}.
    """

    device: str = "cpu"
    processes: int = 1
    command: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _date: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))
    _last: float = field(default_factory=time.monotonic)
    _file: Path | None = None
    _earlier: list[Any] = field(default_factory=list)

    def begin(self, path: Path, warn: Callable[[str], None]) -> None:
        """From now on the record is in a directory, after those of the runs there that this one resumes."""
        self._file = path / RECORD
        if self._file.is_file():
            try:
                self._earlier = list(read_object(self._file, "it is written again")["runs"])
            except (ArtifactError, LookupError, TypeError):
                warn(f"{self._file} is damaged and is written again")
        self.write()

    def lap(self, phase: str) -> None:
        """Add the time since the last call to a phase."""
        now = time.monotonic()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self._last, 3)
        self._last = now
        if self._file is not None:
            self.write()

    def write(self, peak_memory: int | None = None) -> None:
        """Write the file; `peak_memory`: bytes, once they are known."""
        assert self._file is not None
        run = {
            "date": self._date, "command": self.command, "compress_version": VERSION, "processes": self.processes,
            "machine": machine(self.device), "seconds": self.seconds, "peak_memory": peak_memory,
        }  # fmt: skip
        _write(self._file, {"runs": [*self._earlier, run]})


def _write(file: Path, record: dict[str, Any]) -> None:
    """Not sorted by key: phases stay in order."""
    write_text(file, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def machine(device: str) -> dict[str, Any]:
    """CPU by name, instruction sets, cores, threads of torch, GPU by name (where one computes), bytes of memory, system."""
    gpus = [torch.cuda.get_device_name(device)] if device.startswith("cuda") else []
    return {
        "cpu": processes.name(), "instruction_sets": processes.instruction_sets(), "threads": torch.get_num_threads(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(), "gpus": gpus, "memory": int(psutil.virtual_memory().total),
        "system": platform.platform(),
    }  # fmt: skip


# ------------------------------------------------------------ sample outputs


def evaluation_prompts(context: Context) -> list[str]:
    """Beginnings of held-out windows, to be continued; empty where there are none, or the model does not continue text."""
    if context.windows is None or context.streamed.kind != "decoder":
        return []
    starts = context.windows[:, :_PROMPT_TOKENS]
    starts = starts[(starts >= 0).all(dim=1)]  # texts: pieces of images are no prompt
    rows = starts[:: max(1, -(-len(starts) // _PROMPTS))]
    texts = context.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [cut for text in texts if (cut := text.strip("\ufffd")).strip()]


def make_samples(
    artifact: Path, source: Path, prompts: Sequence[str], device: str, limit: int | None, note: bool
) -> dict[str, Any]:
    """Continue prompts with the source and with its artifact, greedily and by equally many tokens.

    Args:
        source: directory of the recipe's model. limit: bytes that the process may take, all in all; None: what is free.
        note: put them into the artifact's record and report.

    Returns:
        `prompts`, `tokens` (at most so many are new), `source` and `artifact` (a text for each prompt; None: this machine cannot run it),
        `left_out` (why, by name), `engine` (what computed the artifact's; None where it was left out).
    """
    made: dict[str, Any] = {"prompts": list(prompts), "tokens": SAMPLE_TOKENS, "left_out": {}, "engine": None}
    for name, path in (("source", source), ("artifact", artifact)):
        try:
            made[name], made["engine"] = _continued(path, list(prompts), device, limit, whole=name == "source")
        except RequestError as error:
            made[name], made["engine"], made["left_out"][name] = None, None, str(error)
    if note:
        _write(artifact / RECORD, read_object(artifact / RECORD, "run it again") | {"samples": made})
        write_report(artifact)
    return made


def recorded_samples(path: Path) -> dict[str, Any] | None:
    """The samples of an artifact, as `make_samples` gave them; None where there are none."""
    if not (path / RECORD).is_file():
        return None
    found: dict[str, Any] | None = read_object(path / RECORD, "remove it").get("samples")
    if found is not None and not (isinstance(found, dict) and found.keys() >= _SAMPLES):
        raise ArtifactError(f"{path / RECORD} has samples that no version of this tool writes; remove it")
    return found


def _continued(path: Path, prompts: list[str], device: str, limit: int | None, whole: bool) -> tuple[list[str], str]:
    """The texts, and the engine that computed them.

    Args:
        whole: refuse a model that does not fit in memory, rather than read it from the disk for every token.
    """
    import runtime

    bound = None if limit is None else max(1, limit - memory_bytes())
    free = available_bytes(torch.device(choose_device(device))) if bound is None else bound
    if whole and (needed := int(_LOADED * Checkpoint(path).total_bytes)) > free:
        raise ResourceError(f"running {path} takes about {size(needed)} of memory, and {size(free)} are left")
    model = runtime.load(path, device=device, max_memory=bound)
    if not hasattr(model, "generate"):
        raise RequestError(f"{path} does not continue text")
    engine = f"{model.engine.device.type}: {model.engine.description}"
    return list(model.generate(prompts, max_new_tokens=SAMPLE_TOKENS)), engine
