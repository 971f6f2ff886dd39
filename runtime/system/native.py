"""C sources of this project as shared libraries: compiled once by the system's compiler, cached, loaded with ctypes.

Every routine in C has a torch implementation beside it that computes the same; without a compiler that one runs (said once in
the log). `COMPRESS_NATIVE=0` switches C off, `COMPRESS_ISA` names a lesser instruction set, `CC` chooses the compiler,
`COMPRESS_CACHE` (default `~/.cache/compress`) says where the libraries are kept. A library is named by the hash of everything it
depends on, so it is never out of date. A large source says which parts of it can be compiled at the same time.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from runtime.system import instruction_sets, processes
from runtime.system.directories import cache_directory, temporary
from runtime.system.processes import how_it_ended

FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
#: Tried in this order: not every compiler and CPU knows how to tune for itself.
_TUNING = (("-march=native",), ("-mcpu=native",), ())
_log = logging.getLogger("compress.native")
_SECONDS = 20  # to compile all sources of this project on one core
_lock = threading.RLock()  # one thread compiles, others wait for what it finds


def _renew_lock() -> None:
    """In a forked process the thread that holds the lock does not exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def tunings() -> tuple[tuple[str, ...], ...]:
    """Flags for the instruction set that `COMPRESS_ISA` forces, or for this CPU; the first that the compiler takes are to be used.

    Raises:
        RequestError: this machine cannot run it.
    """
    forced = instruction_sets.forced()
    return _TUNING if forced is None else instruction_sets.tunings(forced)


def library(
    source: Path, tuning: tuple[tuple[str, ...], ...] | None = None, parts: tuple[int, ...] = ()
) -> ctypes.CDLL | None:
    """The compiled `source` (a C file, and the headers beside it), or None where there is no way to have it.

    Threads that ask at the same time wait for one another: it is compiled once, and the reason why it cannot be is logged once.

    Args:
        source: the C file.
        tuning: flags for the instruction set, of which the first that the compiler takes are used; None: `tunings()`.
        parts: values of `PART` that the source is compiled with at the same time, the one that takes longest first; they make one
            library together. Empty: it is one unit.

    Raises:
        RequestError: `COMPRESS_ISA` names what this machine cannot run.
    """
    with _lock:
        return _library(source, tuning, parts)


@cache
def _library(
    source: Path, tuning: tuple[tuple[str, ...], ...] | None = None, parts: tuple[int, ...] = ()
) -> ctypes.CDLL | None:
    if os.environ.get("COMPRESS_NATIVE", "1") == "0":
        return None
    compiler = find_compiler()
    if compiler is None:
        _log.warning("no C compiler was found (cc, gcc, clang): %s runs in torch, which is slower", source.stem)
        return None
    reason = "unknown"
    for flags in tunings() if tuning is None else tuning:
        try:
            return _load(source, compiler, (*FLAGS, *flags), parts)
        except subprocess.CalledProcessError as error:
            reason = _reason(error)
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = str(error)
    _log.warning("%s could not be compiled (%s): it runs in torch, which is slower", source.name, reason)
    return None


def _reason(error: subprocess.CalledProcessError) -> str:
    said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
    # A compiler that starts others says so of theirs, and ends with a code of its own.
    if any("Killed signal" in line for line in said):
        return f"the compiler {how_it_ended(-signal.SIGKILL)}"
    if error.returncode < 0:
        return f"the compiler {how_it_ended(error.returncode)}"
    return said[-1] if said else str(error)


def find_compiler() -> str | None:
    """The command that compiles C here, or None."""
    return os.environ.get("CC") or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)


def _load(source: Path, compiler: str, flags: tuple[str, ...], parts: tuple[int, ...]) -> ctypes.CDLL:
    """The library from the cache, or from a private temporary directory where the cache cannot be used."""
    try:
        return ctypes.CDLL(str(_build(source, compiler, flags, cache_directory("native"), parts)))
    except OSError:  # not writable, not executable
        return ctypes.CDLL(str(_build(source, compiler, flags, temporary() / "native", parts)))


def _build(source: Path, compiler: str, flags: tuple[str, ...], directory: Path, parts: tuple[int, ...] = ()) -> Path:
    """Path of the library, compiled if it is not in the directory."""
    code = b"".join(file.read_bytes() for file in [source, *sorted(source.parent.glob("*.h"))])
    target = directory / f"{source.stem}-{_key(code, compiler, (*flags, *map(str, parts)))}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        _say_once()
        command = [*shlex.split(compiler), *flags]
        _compile(command, source, built, parts)
        built.replace(target)  # whole or not at all, whoever else compiles it at the same time
    return target


def _compile(command: Sequence[str], source: Path, built: Path, parts: tuple[int, ...]) -> None:
    """CalledProcessError, OSError, TimeoutExpired: the compiler does not."""

    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=300)

    if not parts:
        run(str(source), "-o", str(built), "-lm")
        return
    objects = [str(built.with_suffix(f".{part}.o")) for part in parts]
    with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        done = [
            pool.submit(run, "-c", f"-DPART={part}", str(source), "-o", found)
            for part, found in zip(parts, objects, strict=True)
        ]
        for each in done:
            try:
                each.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    run(*objects, "-o", str(built), "-lm")


@cache
def _say_once() -> None:
    """Log the first compilation of a process at level INFO, which the command line shows."""
    _log.info("compiling the CPU kernels for this machine, once; this takes up to %d s", _SECONDS)


def _key(code: bytes, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(code)
    for part in (compiler, *flags, processes.identity()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]
