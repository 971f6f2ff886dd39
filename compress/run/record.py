"""Run record of an artifact (`run.json`): date, command, machine, time and memory of each run that wrote it, and sample outputs.

The manifest does not hash it, because equal runs take different times.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from compress.core.files import read_object, write_text
from compress.core.progress import memory_bytes
from compress.core.resources import bundled_recipes
from compress.core.run_directory import RECORD
from compress.core.version import VERSION
from compress.model.context import Context
from compress.report import write_report
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError, RequestError, ResourceError
from runtime.system import instruction_sets, processes
from runtime.system.device import choose_device
from runtime.system.memory import available_bytes
from runtime.system.sizes import size

SAMPLE_TOKENS = 48
_PROMPTS, _PROMPT_TOKENS = (
    3,
    24,
)  # where the recipe names no prompt: how many beginnings of held-out windows, and how long
#: Memory of a loaded model relative to its tensors: buffers of a step, and weights being repacked.
_LOADED = 1.2
#: Seconds that loading and continuing may take for the artifact to be loaded again, to compare its speed.
_PATIENCE = 20
_SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)|\bhf_\w{8,}|(?i:(?<=token=)|(?<=secret=)|(?<=password=)|(?<=api_key=))\S+")


def shown_command(arguments: Sequence[str]) -> str:
    """The command line, quoted for a shell, with passwords and access tokens replaced by `***`."""
    return shlex.join(["compress", *(_SECRET.sub("***", argument) for argument in arguments)])


@dataclass
class RunRecord:
    """Wall-clock seconds of a run by phase, written to the output directory after every phase.

    Attributes:
        device: "cpu", "cuda", "cuda:1". processes: number of processes of the run.
        command: the current command line; None if called from Python.
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
        """Start writing the record to a directory, after the entries of the runs that this one resumes."""
        self._file = path / RECORD
        if self._file.is_file():
            try:
                self._earlier = list(read_object(self._file, "it is written again")["runs"])
            except (ArtifactError, LookupError, TypeError):
                warn(f"{self._file} is damaged and is written again")
        self.write()

    def lap(self, phase: str) -> None:
        """Add the time since the last call to `phase`."""
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
    """Write JSON with keys in insertion order, so that phases stay in order."""
    write_text(file, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def machine(device: str) -> dict[str, Any]:
    """CPU name, instruction sets, the one of the C kernels, physical cores, torch threads, GPUs used, bytes of memory, system."""
    gpus = [torch.cuda.get_device_name(device)] if device.startswith("cuda") else []
    return {
        "cpu": processes.name(), "instruction_sets": processes.instruction_sets(), "threads": torch.get_num_threads(),
        "kernels": instruction_sets.chosen(), "cores": psutil.cpu_count(logical=False) or os.cpu_count(), "gpus": gpus,
        "memory": int(psutil.virtual_memory().total), "system": platform.platform(),
    }  # fmt: skip


# ------------------------------------------------------------ sample outputs


def sample_prompts(context: Context) -> list[str]:
    """The recipe's `sample`; without one, or where it is a bundled recipe's and the text is not, the beginnings of evaluation rows.

    Empty if there is neither, or the model does not generate text.
    """
    sample, evaluation, origin = context.recipe.sample, context.evaluation, context.recipe.origin
    written = None if origin.override_of(("sample",)) else origin.file
    shipped = written is not None and written.resolve() in {file.resolve() for file in bundled_recipes().values()}
    if sample and (not shipped or evaluation is None or evaluation.kind == "bundled"):
        return [sample]
    if context.windows is None or context.streamed.kind != "decoder":
        return []
    starts = context.windows[:, :_PROMPT_TOKENS]
    starts = starts[(starts >= 0).all(dim=1)]  # texts: pieces of images are no prompt
    rows = starts[:: max(1, -(-len(starts) // _PROMPTS))]
    texts = context.tokenizer.batch_decode(rows, skip_special_tokens=True)
    return [cut for text in texts if (cut := text.strip("\ufffd")).strip()] or ([sample] if sample else [])


def make_samples(
    artifact: Path, source: Path, prompts: Sequence[str], device: str, limit: int | None, note: bool
) -> dict[str, Any]:
    """Continue prompts greedily with the source and with its artifact.

    Args:
        source: directory of the recipe's model. limit: memory limit of the process in bytes; None: free memory.
        note: add the samples to the artifact's `run.json` and report.

    Returns:
        `prompts`, `tokens` (largest number of new tokens), `source` and `artifact` (one text per prompt; None: cannot run on this machine),
        `left_out` (the reason, by name), `engine` (of the artifact's texts; None if it was left out), `speed` (decoding of one prompt, by
        the artifact as it is and, where that does not take long, without its cache policy and without its draft: `how`,
        `tokens_per_second`, `tokens`, `engine`).
    """
    made: dict[str, Any] = {
        "prompts": list(prompts),
        "tokens": SAMPLE_TOKENS,
        "left_out": {},
        "engine": None,
        "speed": [],
    }
    brings, quick = _brings(artifact), False
    for name, path in (("source", source), ("artifact", artifact)):
        start = time.monotonic()
        try:
            model = _load(path, device, limit, whole=name == "source")
            made[name] = list(model.generate(list(prompts), max_new_tokens=SAMPLE_TOKENS))
            made["engine"] = f"{model.engine.device.type}: {model.engine.description}"
            quick = time.monotonic() - start < _PATIENCE
            if name == "artifact":
                made["speed"] = [_decoding_speed(model, prompts[0], " and ".join(own for _, own, _ in brings))]
        except RequestError as error:
            made[name], made["engine"], made["left_out"][name] = None, None, str(error)
        model = None
    for option, _, without in brings if made["speed"] and quick else ():
        with suppress(RequestError):  # it may run with its compressed cache alone: the plain one is larger
            model = _load(artifact, device, limit, whole=False, verify=False, **{option: False})
            model.generate(prompts[0], max_new_tokens=SAMPLE_TOKENS, ignore_eos=True)
            made["speed"].append(_decoding_speed(model, prompts[0], without))
        model = None
    if note:
        _write(artifact / RECORD, read_object(artifact / RECORD, "run it again") | {"samples": made})
        write_report(artifact)
    return made


def _brings(artifact: Path) -> list[tuple[str, str, str]]:
    """What else than weights an artifact decodes with: (option of `runtime.load`, words for with it, words for without)."""
    known = {
        "kv_cache": ("kv_cache", "with its compressed cache", "with a plain cache"),
        "draft": ("drafter", "with its draft", "without the draft"),
    }
    manifest = Artifact(artifact).manifest or {}
    return [words for key, words in known.items() if manifest.get(key)]


def _decoding_speed(model: Any, prompt: str, how: str) -> dict[str, Any]:
    """Of a warm model (the first call compiles and tunes), rough because of few tokens: `how`, `tokens_per_second`, `tokens`, `engine`."""
    model.generate(prompt, max_new_tokens=SAMPLE_TOKENS, ignore_eos=True)
    found = model.stats
    rate = round(found["tokens_per_second"], 1)
    return {"how": how, "tokens_per_second": rate, "tokens": found["new_tokens"], "engine": found["engine"]}


def _load(path: Path, device: str, limit: int | None, whole: bool, **options: Any) -> Any:
    """A model that continues text.

    Args:
        whole: refuse a model that does not fit in memory, instead of streaming it from disk for every token.
    """
    import runtime

    bound = None if limit is None else max(1, limit - memory_bytes())
    free = available_bytes(torch.device(choose_device(device))) if bound is None else bound
    if whole and (needed := int(_LOADED * Checkpoint(path).total_bytes)) > free:
        raise ResourceError(f"running {path} needs about {size(needed)} of memory, and {size(free)} is free")
    model = runtime.load(path, device=device, max_memory=bound, **options)
    if not hasattr(model, "generate"):
        raise RequestError(f"{path} does not continue text")
    return model
