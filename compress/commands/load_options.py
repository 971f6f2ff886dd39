"""Options of the commands that run a model, and the keywords of `runtime.load` they give."""

from __future__ import annotations

import json
from typing import Any

import typer

from runtime.errors import RequestError

PATH = typer.Argument(
    ..., metavar="MODEL", help="An artifact, or a plain Hugging Face checkpoint (directory or hub id)."
)
DEVICE = typer.Option("auto", "--device", help="Device to run on: auto, cpu, cuda, cuda:1.")
KERNELS = typer.Option(
    "auto",
    "--kernels",
    help="auto, fast (int8 activations where that is faster), or a kernel's name (`reference` is plain torch).",
)
DTYPE = typer.Option(None, "--dtype", help="Compute dtype: float32, float16 or bfloat16 (default: the checkpoint's).")
THREADS = typer.Option(None, "--threads", min=1, help="CPU threads (default: torch's choice).")
MAX_MEMORY = typer.Option(
    None,
    "--max-memory",
    help='Memory limit for the model, such as "2GB": blocks that do not fit are read from disk while others compute.',
)


def _no_option(value: str | None) -> str | None:
    """Refuse a value that begins with a dash: it is the next option, and the drafter's name is missing."""
    if value is not None and value.startswith("-"):
        from runtime.drafting.config.registry import drafters

        names = ", ".join(method.name for method in drafters("text", "target"))
        allowed = f"a name ({names}), the directory of a draft model, a JSON object or list, or none"
        raise RequestError(f"--drafter: {value!r} is an option, not a drafter; expected {allowed}")
    return value


KV_CACHE = typer.Option(
    None,
    "--kv-cache",
    metavar="POLICY",
    help="KV-cache compression: a published method (`compress methods`), a JSON object, a .json file, or none (default: the "
    "artifact's policy).",
)
DRAFTER = typer.Option(
    None,
    "--drafter",
    metavar="DRAFTER",
    callback=_no_option,
    help="Speculative decoding: a drafter's name (lookup, suffix, ...), the directory of a draft model, a JSON object or list, or "
    "none (default: the artifact's own draft).",
)
TRUST = typer.Option(False, "--trust-remote-code", help="Run Python code that the checkpoint brings.")


def load_options(
    device: str,
    kernels: str,
    dtype: str | None,
    threads: int | None,
    trust_remote_code: bool,
    max_memory: str | None = None,
    kv_cache: str | None = None,
    drafter: str | None = None,
) -> dict[str, Any]:
    """Keywords of `runtime.load`."""
    return {
        "device": device, "kernels": kernels, "dtype": dtype, "threads": threads, "trust_remote_code": trust_remote_code,
        "max_memory": max_memory, "kv_cache": kv_cache, "drafter": read_drafter(drafter),
    }  # fmt: skip


def read_drafter(value: str | None) -> Any:
    """Value of --drafter: JSON if it begins like JSON, else a name or a directory. RequestError: no such drafter."""
    if value is None:
        return None
    written: Any = value
    if value.strip()[:1] in ("{", "["):
        try:
            written = json.loads(value)
        except ValueError as error:
            raise RequestError(f"--drafter: {value!r} is not JSON: {error}") from None
    from runtime.drafting.config.build import check_written

    check_written(written, "--drafter")
    return written
