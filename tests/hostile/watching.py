"""What reading a hostile directory may do: say one sentence, in little time and memory, and open nothing that lies elsewhere."""

from __future__ import annotations

import os
import resource
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from runtime.errors import CompressError

SECONDS = 10.0  # of the processor, for one input
MEMORY = 3 * 2**30  # bytes that one input may add to what the process may address
_ROOT = Path(__file__).resolve().parents[2]
_SYSTEM = (
    "/proc",
    "/sys",
    "/dev",
    "/usr",
    "/lib",
    "/etc/ld.so",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
)
_PYTHON = (sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), *sysconfig.get_paths().values())
_HARMLESS = (*_SYSTEM, *_PYTHON, str(_ROOT))
_RUNS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn")
_NET = ("socket.connect", "socket.getaddrinfo", "urllib.Request")


@dataclass
class _State:
    """Of the audit hook, which cannot be taken away again."""

    active: bool = False
    inside: str = ""
    also: tuple[str, ...] = ()
    seen: list[str] | None = None


_state = _State()


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _state.active or _state.seen is None:
        return
    if event == "open":
        _look(arguments[0], arguments[1])
    elif event == "pickle.find_class":
        _state.seen.append(f"a pickle asks for {arguments[0]}.{arguments[1]}")
    elif event in _RUNS or event in _NET:
        _state.seen.append(f"{event} {str(arguments)[:200]}")
    elif event == "exec" and getattr(arguments[0], "co_filename", "").startswith(_state.inside):
        _state.seen.append(f"code of {arguments[0].co_filename} is run")


def _look(file: Any, mode: Any) -> None:
    assert _state.seen is not None
    if not isinstance(file, str | bytes | os.PathLike):
        return
    path = os.path.abspath(os.fsdecode(file))
    writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    inside = path == _state.inside or path.startswith(_state.inside + os.sep)
    allowed = path.startswith(_state.also) or (path.startswith(_HARMLESS) and not writes)
    if (inside and not writes) or allowed or path == os.devnull:
        return
    _state.seen.append(f"{'writes' if writes else 'opens'} {path[:200]}")


sys.addaudithook(_hook)


class TooLongError(BaseException):
    """No `except Exception` holds it up."""


@dataclass(frozen=True)
class Outcome:
    """Of one input.

    Attributes:
        kind: "read", "refused", or what is wrong.
        text: the sentence.
    """

    kind: str
    text: str = ""

    @property
    def wrong(self) -> bool:
        return self.kind not in ("read", "refused")


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What is asked for beyond it is a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def watch(read: Callable[[Path], Any], directory: Path, also: tuple[Path, ...] = ()) -> Outcome:
    """Let `read` read a directory.

    Args:
        also: what may be opened beside it, also for writing: caches.
    """
    seen: list[str] = []
    _state.inside, _state.also, _state.seen = str(directory), tuple(map(str, also)), seen
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, 3 * SECONDS)
    start = time.process_time()
    _state.active = True
    try:
        with bounded_memory():
            read(directory)
        outcome = Outcome("read")
    except CompressError as error:
        text = str(error)
        outcome = Outcome("refused" if text.strip() and "Traceback" not in text else "no sentence", text)
    except TooLongError:
        outcome = Outcome("hangs")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        outcome = Outcome("crash", f"{type(error).__name__}: {str(error)[:300]} at {place}")
    finally:
        _state.active = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if seen:
        return Outcome("escape", "; ".join(seen[:3]))
    if time.process_time() - start > SECONDS and not outcome.wrong:
        return Outcome("slow", f"{time.process_time() - start:.1f} s")
    return outcome


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLongError
