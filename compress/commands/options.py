"""Options that several commands share, and the keywords of `runtime.load` that some of them give."""

from __future__ import annotations

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
OUTPUT = typer.Option(None, "--output", "-o", help="Directory of the artifact, instead of the recipe's.")
SET = typer.Option([], "--set", help="Change a recipe key, as in stages.0.quantize.bits=3; repeatable.")
MAX_MEMORY = typer.Option(
    None, "--max-memory", metavar="SIZE", help='Memory limit of the process, such as "6GB"; larger runs are refused.'
)


def memory_limit(written: str | None) -> int | None:
    """Bytes of a --max-memory; None: none was given."""
    from runtime.system.sizes import byte_count

    return None if written is None else byte_count("--max-memory", written)


REPORT_TO = typer.Option(
    None,
    "--report-to",
    metavar="TRACKER",
    help="Send the run's numbers to wandb, mlflow or trackio, as that is set up.",
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
TRUST = typer.Option(False, "--trust-remote-code", help="Run Python code that the checkpoint brings.")
