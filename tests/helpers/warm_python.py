"""An interpreter that has imported torch, transformers and this project already: `python()`, to start programs with in place of
`sys.executable`. Seconds of imports are then paid once in a process of tests.

It is a small program that sends its arguments, environment, working directory and standard files to a server, which forks. The fork
runs the program; it dies when the small program is killed, which ends as the fork does. Not for tests of what is imported when, of
memory, of parents and children, or of variables that are read while modules are imported. Programs share one seed of hashes."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = sys.executable
IMPORTED = (
    "torch.distributed.run", "torch._dynamo", "transformers.models.llama.modeling_llama", "compress.cli", "compress.run.run",
    "compress.commands.apply", "compress.sweeps.trial",
)  # fmt: skip

CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
asked = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
server.sendmsg([len(asked).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(asked)
pid = int.from_bytes(server.recv(8), "little")
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int.from_bytes(server.recv(8), "little", signed=True)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def python(**environment: str) -> str:
    """Path of the program; the server is started, and ends with this process. `environment`: variables that are set while the server
    imports, as `TRITON_INTERPRET="1"`, which programs must be given too."""
    directory = tempfile.TemporaryDirectory(prefix="warm-python-")
    atexit.register(directory.cleanup)
    address = str(Path(directory.name) / "server")
    ends, held = os.pipe()  # closed by whatever ends this process
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [INTERPRETER, __file__, address, str(ends)], env=os.environ | environment | {"PYTHONPATH": paths},
        pass_fds=(ends,), stdout=subprocess.PIPE,
    )  # fmt: skip
    os.close(ends)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server has not started"
    atexit.register(server.wait)
    atexit.register(os.close, held)
    client = Path(directory.name) / "python"
    client.write_text(CLIENT.format(python=INTERPRETER, address=address))
    client.chmod(client.stat().st_mode | stat.S_IXUSR)
    return str(client)


def launched(
    processes: int, *arguments: object, timeout: float = 200, warm: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A program of `arguments` in several processes of one thread, as torchrun starts them, which see no GPU."""
    interpreter = python(**environment) if warm else INTERPRETER
    command = [interpreter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    own = {"PYTHON_EXEC": interpreter, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *map(str, arguments)], env=os.environ | own | environment, capture_output=True, text=True,
        timeout=timeout,
    )  # fmt: skip


def serve(address: str, ends: int) -> None:
    """Fork for everyone that connects to `address`, until the other end of the pipe `ends` is closed."""
    for name in IMPORTED:
        __import__(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    # A byte for every signal, so that the loop wakes when a program has ended.
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    programs: dict[int, socket.socket] = {}
    waiting = selectors.DefaultSelector()
    for file in (listening, woken, ends):
        waiting.register(file, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        ready = [key.fileobj for key, _ in waiting.select()]
        if ends in ready:
            break
        if woken in ready:
            woken.recv(4096)
        for pid in list(programs):
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                client = programs.pop(pid)
                waiting.unregister(client)
                with client:
                    _tell(client, os.waitstatus_to_exitcode(ended[1]))
        for pid, client in programs.items():
            if client in ready:  # nothing is ever sent there: it was killed
                os.kill(pid, signal.SIGKILL)
        if listening in ready:
            client, _ = listening.accept()
            files, asked = _request(client)
            if pid := os.fork():
                for file in files:
                    os.close(file)
                programs[pid] = client
                waiting.register(client, selectors.EVENT_READ)
                _tell(client, pid)
            else:
                signal.set_wakeup_fd(-1)
                for connection in (listening, woken, wakes, client, *programs.values()):
                    connection.close()
                waiting.close()
                os.close(ends)
                _run(files, *asked)
    for pid in programs:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        client.sendall(number.to_bytes(8, "little", signed=True))


def _request(client: socket.socket) -> tuple[list[int], tuple[list[str], dict[str, str], str]]:
    head, files, _, _ = socket.recv_fds(client, 8, 3)
    size, asked = int.from_bytes(head, "little"), b""
    while len(asked) < size:
        asked += client.recv(size - len(asked))
    return list(files), json.loads(asked)


def _run(files: list[int], command: list[str], environment: dict[str, str], directory: str) -> None:
    """What the `command` of an interpreter and its arguments does, then the end of this process."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    here = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable, *arguments = command
    own = str(Path(__file__).parent)
    rest = [path for path in sys.path if path not in here and path != own]
    sys.path[:] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path] + rest
    code = 1
    try:
        _start(arguments)
        code = 0
    except SystemExit as error:
        code = error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if code < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    os._exit(code)


def _start(arguments: list[str]) -> None:
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        module: Any = type(sys)("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
