"""Options that several commands share, and the keywords of `runtime.load` that some of them give."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from compress.core.resources import bundled_recipes
from runtime.errors import RequestError

JSON = typer.Option(False, "--json", help="Print one JSON object on stdout and nothing else there.")
QUIET = typer.Option(False, "--quiet", "-q", help="No progress on stderr.")
DEVICE = typer.Option("auto", "--device", help="Device to compute on: auto, cpu, cuda, cuda:1.")

# Recipes and sweeps.


def completion(bundled: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Shell completion of the bundled names and of the YAML files of the working directory."""
    return lambda incomplete: [n for n in [*bundled(), *map(str, Path().glob("*.yaml"))] if n.startswith(incomplete)]


RECIPE = typer.Argument(
    ...,
    help="A recipe file, or the name of a bundled recipe (`compress recipes`).",
    autocompletion=completion(bundled_recipes),
)
MODEL = typer.Option(None, "--model", "-m", help="Checkpoint directory or hub id, instead of the recipe's.")
OUTPUT = typer.Option(
    None, "--output", "-o", help="Directory of the artifact (default: the recipe's; for another --model, RECIPE-MODEL)."
)
SET = typer.Option([], "--set", help="Change a recipe key, as in stages.0.quantize.bits=3; repeatable.")
MAX_MEMORY = typer.Option(
    None, "--max-memory", metavar="SIZE", help='Memory limit of the process, such as "6GB"; larger runs are refused.'
)

ALLOCATE = typer.Option(
    False,
    "--allocate",
    help="Measure the model now and show which scheme each layer gets under a budget; takes as long as that part of apply.",
)


def memory_limit(written: str | None) -> int | None:
    """Bytes of a --max-memory; None: none was given."""
    from runtime.system.sizes import byte_count

    return None if written is None else byte_count("--max-memory", written)


REPORT_TO = typer.Option(
    None,
    "--report-to",
    metavar="TRACKER",
    help="Log the run's metrics to wandb, mlflow or trackio, with that library's own settings.",
)

# Running a model.


def _read_drafter(value: str | None) -> Any:
    """Value of --drafter: JSON if it begins like JSON, else a name or a directory. RequestError: no such drafter."""
    if value is None:
        return None
    from runtime.drafting.config.build import check_written
    from runtime.drafting.config.registry import drafters

    if value.startswith("-"):  # the next option: the drafter's name is missing
        names = ", ".join(method.name for method in drafters("text", "target"))
        allowed = f"a name ({names}), the directory of a draft model, a JSON object or list, or none"
        raise RequestError(f"--drafter: {value!r} is an option, not a drafter; expected {allowed}")
    written: Any = value
    if value.strip()[:1] in ("{", "["):
        try:
            written = json.loads(value)
        except ValueError as error:
            raise RequestError(f"--drafter: {value!r} is not JSON: {error}") from None
    check_written(written, "--drafter")
    return written


def _read_scheme(value: str | None) -> str | None:
    """Value of --scheme. RequestError: no scheme of that name is made while loading."""
    if value is not None:
        from runtime.layers.rounding import read_scheme

        read_scheme(value)
    return value


PATH = typer.Argument(..., metavar="MODEL", help="An artifact, or a Hugging Face checkpoint (directory or hub id).")
KERNELS = typer.Option("auto", "--kernels", help="auto, fast (int8 activations allowed), reference, or a kernel name.")
DTYPE = typer.Option(
    None, "--dtype", help="Compute dtype: float32, float16, bfloat16, or fp32, fp16, bf16 (default: the checkpoint's)."
)
THREADS = typer.Option(None, "--threads", min=1, help="CPU threads (default: torch's choice).")
MODEL_MEMORY = typer.Option(
    None, "--max-memory", metavar="SIZE", help='Memory limit, such as "2GB"; blocks beyond it are read from disk.'
)
KV_CACHE = typer.Option(
    None,
    "--kv-cache",
    metavar="POLICY",
    help="A method (`compress methods`), a JSON object, a .json file, or none (default: the artifact's policy).",
)
DRAFTER = typer.Option(
    None,
    "--drafter",
    metavar="DRAFTER",
    callback=_read_drafter,
    help="A drafter's name, the directory of a draft model, JSON, or none (default: the artifact's own draft).",
)
ADAPTER = typer.Option(
    None, "--adapter", metavar="DIR", help="LoRA adapter saved by PEFT, beside the packed weights (default: none)."
)
SCHEME = typer.Option(
    None,
    "--scheme",
    metavar="SCHEME",
    callback=_read_scheme,
    help="Round the linear layers of an uncompressed checkpoint while loading, without calibration: W8A16, W8A8-INT8, LLM.int8, ...",
)
TRUST = typer.Option(False, "--trust-remote-code", help="Run Python code from the checkpoint.")

# Options of generation, with the names and types of `runtime.load` and `Model.generate`.

LOADING: dict[str, tuple[Any, Any]] = {
    "verify": (
        bool | None,
        typer.Option(
            None,
            "--verify/--no-verify",
            show_default=False,
            help="Check the SHA-256 of every file first (default: up to 1 GiB).",
        ),
    ),
    "device": (str, DEVICE),
    "kernels": (str, KERNELS),
    "dtype": (str | None, DTYPE),
    "threads": (int | None, THREADS),
    "max_memory": (str | None, MODEL_MEMORY),
    "kv_cache": (str | None, KV_CACHE),
    "drafter": (str | None, DRAFTER),
    "adapter": (str | None, ADAPTER),
    "scheme": (str | None, SCHEME),
    "trust_remote_code": (bool, TRUST),
}
SAMPLING: dict[str, tuple[Any, Any]] = {
    "max_new_tokens": (
        int | None,
        typer.Option(
            None, "--max-new-tokens", "-n", min=1, help="Stop after this many tokens (default: 128; in a chat 1,024)."
        ),
    ),
    "temperature": (float, typer.Option(0.0, "--temperature", "-T", help="0: greedy; above 0: sample.")),
    "top_k": (int | None, typer.Option(None, "--top-k", help="Sample among the k most likely tokens.")),
    "top_p": (
        float,
        typer.Option(1.0, "--top-p", help="Sample among the most likely tokens up to this total probability."),
    ),
    "min_p": (
        float,
        typer.Option(0.0, "--min-p", help="Drop tokens less likely than this fraction of the most likely."),
    ),
    "repetition_penalty": (
        float,
        typer.Option(1.0, "--repetition-penalty", help="Above 1: discourage repetition."),
    ),
    "stop": (list[str], typer.Option([], "--stop", help="Stop before this text; repeatable.")),
    "seed": (int | None, typer.Option(None, "--seed", help="Make sampling reproducible.")),
}


def with_generation_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters `sampling` and `loading` become the options of `SAMPLING` and `LOADING`, given as dicts."""
    groups = {"sampling": SAMPLING, "loading": LOADING}
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for own in signature.parameters.values():
        if own.name not in groups:
            parameters.append(own)
            continue
        for name, (kind, option) in groups[own.name].items():
            parameters.append(inspect.Parameter(name, own.kind, default=option, annotation=kind))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        shared = {group: {name: given.pop(name) for name in options} for group, options in groups.items()}
        command(**given, **shared)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
