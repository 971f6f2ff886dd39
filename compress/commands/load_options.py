"""Options of the commands that load a model to run it, and what `runtime.load` gets from them."""

from __future__ import annotations

import json
from typing import Any

import typer

from runtime.errors import RequestError

PATH = typer.Argument(
    ..., metavar="MODEL", help="An artifact, or a plain Hugging Face checkpoint (directory or hub id)."
)
DEVICE = typer.Option("auto", "--device", help="Where it runs: auto, cpu, cuda, cuda:1.")
KERNELS = typer.Option(
    "auto",
    "--kernels",
    help="auto, fast (activations rounded to int8 where that is faster), or the name of a kernel (`reference` is plain torch).",
)
DTYPE = typer.Option(
    None, "--dtype", help="Compute in float32, float16 or bfloat16 (default: what the checkpoint has)."
)
THREADS = typer.Option(None, "--threads", min=1, help="CPU threads (default: as torch decides).")
MAX_MEMORY = typer.Option(
    None,
    "--max-memory",
    help='Memory for weights, such as "2GB": blocks that do not fit are read from disk as they are needed.',
)


def _no_option(value: str | None) -> str | None:
    """A drafter's name never begins with a dash: that is the next option, which was taken for the value that is missing."""
    if value is not None and value.startswith("-"):
        from runtime.drafting.config.registry import FREE, SELF

        allowed = f"a name ({', '.join([*FREE.names, *SELF.names])}), the directory of a draft model, a JSON object or list, or none"
        raise RequestError(f"--drafter: {value!r} is an option and no drafter; expected {allowed}")
    return value


KV_CACHE = typer.Option(
    None,
    "--kv-cache",
    metavar="POLICY",
    help="How keys and values are held: a published name (`compress methods`), a JSON object, a .json file, or none; default: as "
    "the artifact says.",
)
DRAFTER = typer.Option(
    None,
    "--drafter",
    metavar="DRAFTER",
    callback=_no_option,
    help="What proposes tokens that the model verifies several at a time: a name (lookup, suffix, ...), the directory of a draft model, "
    "a JSON object or list, or none; default: as the artifact says.",
)
TRUST = typer.Option(False, "--trust-remote-code", help="Let the checkpoint bring Python code that is run.")


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
    """What --drafter says: JSON where it begins like JSON, else a name or a directory; RequestError where nothing is called so."""
    if value is None:
        return None
    written: Any = value
    if value.strip()[:1] in ("{", "["):
        try:
            written = json.loads(value)
        except ValueError as error:
            raise RequestError(f"--drafter: {value!r} is no JSON: {error}") from None
    from runtime.drafting.config.build import check_written

    check_written(written, "--drafter")
    return written
