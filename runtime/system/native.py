"""C sources of this project as shared libraries: compiled once by the system's compiler, cached, loaded with ctypes.

Every routine in C has a torch implementation beside it that computes the same; without a compiler that one runs (said once in
the log). `COMPRESS_NATIVE=0` switches C off, `COMPRESS_ISA` names a lesser instruction set, `CC` chooses the compiler,
`COMPRESS_CACHE` (default `~/.cache/compress`) says where the libraries are kept. A library is named by the hash of everything it
depends on, so it is never out of date. A large source says which parts of it can be compiled at the same time.
"""

from __future__ import annotations

import atexit
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
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from runtime.system import instruction_sets, processes
from runtime.system.directories import cache_directory, temporary
from runtime.system.processes import how_it_ended

FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
#: Tried in this order: not every compiler and CPU knows how to tune for itself.
_TUNING = (("-march=native",), ("-mcpu=native",), ())
_log = logging.getLogger("compress.native")
_SECONDS = 20  # about what all sources of this project take on one core
_LIMIT = 300  # seconds
_locks: defaultdict[object, threading.RLock] = defaultdict(
    threading.RLock
)  # one thread compiles, others wait for what it finds
_children: set[subprocess.Popen[bytes]] = set()  # compilers of parts
_exiting = threading.Event()


def _forget_threads() -> None:
    """In a forked process the threads that hold locks and compile do not exist."""
    _locks.clear()
    _children.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


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
    with _locks[source, tuning, parts]:
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
    """CalledProcessError, OSError or TimeoutExpired where it fails."""
    inputs = _compile_parts(command, source, built, parts) if parts else [str(source)]
    link = [*command, *inputs, "-o", str(built), "-lm"]
    subprocess.run(link, check=True, capture_output=True, timeout=_LIMIT)


def _compile_parts(command: Sequence[str], source: Path, built: Path, parts: tuple[int, ...]) -> list[str]:
    """Paths of the object files, compiled at the same time on as many cores as there are."""
    command = [flag for flag in command if flag != "-shared"]
    objects = {part: str(built.with_suffix(f".{part}.o")) for part in parts}
    waiting, limit = list(parts), time.monotonic() + _LIMIT
    running: dict[subprocess.Popen[bytes], int] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _cores():
                part = waiting.pop(0)
                arguments = [*command, "-c", f"-DPART={part}", str(source), "-o", objects[part]]
                with open(f"{objects[part]}.log", "wb") as said:
                    # In a session of its own, so that an interrupt of the caller does not end it.
                    job = subprocess.Popen(arguments, stderr=said, stdout=said, start_new_session=True)
                running[job] = part
                _children.add(job)
            for job in [each for each in running if each.poll() is not None]:
                part = running.pop(job)
                _children.discard(job)
                if _exiting.is_set():
                    raise SystemExit  # of this thread; nobody waits for the library
                if job.returncode:
                    written = Path(f"{objects[part]}.log").read_bytes()
                    raise subprocess.CalledProcessError(job.returncode, job.args, stderr=written)
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired(command, _LIMIT)
            time.sleep(0.01)
    finally:
        for job in running:
            _end(job)
    return list(objects.values())


def _cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end(job: subprocess.Popen[bytes]) -> None:
    """Kill a compiler and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    _children.discard(job)


@atexit.register
def _end_all() -> None:
    """The thread that compiles ends with the process, and its compilers too."""
    _exiting.set()
    for job in list(_children):
        _end(job)


@cache
def _say_once() -> None:
    """Log the first compilation of a process at level INFO, which the command line shows."""
    _log.info("compiling the CPU kernels for this machine, once; this takes up to %d s", _SECONDS)


def _key(code: bytes, compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(code)
    for part in (compiler, *flags, processes.identity()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:24]
