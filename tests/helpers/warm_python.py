"""A fork server for tests: `python()` is the path of a stand-in for `sys.executable`, whose programs are forked from a process that has
already imported torch, transformers and this project. So seconds of imports are paid once in a process of tests.

The stand-in sends its arguments, environment, directory and standard files to the server, and ends as the program does. It passes SIGINT
and SIGTERM on; when it is killed, the program is killed a moment later. Do not use it for tests of imports, memory, process trees,
inherited descriptors or limits, the end of an interpreter, or variables that are read at import. All programs share one hash seed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = sys.executable
ENVIRONMENT = dict(os.environ)  # not what the test that is the first to ask has set
PRELOADED = (
    "torch.distributed.run", "torch._dynamo", "transformers.models.llama.modeling_llama", "compress.cli", "compress.run.run",
    "compress.commands.apply", "compress.sweeps.trial",
)  # fmt: skip

STAND_IN = """#!/bin/sh
exec '{python}' -IS '{client}' "$0" "$@"
"""
CLIENT = """
import array, contextlib, json, os, signal, socket, sys

def receive():
    if len(data := server.recv(8)) < 8:
        sys.exit("the server of warm_python has ended")
    return int.from_bytes(data, "little", signed=True)

def forward(number, frame):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
server.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
server.sendall(request)
pid = receive()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, forward)
code = receive()
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@cache
def python(**variables: str) -> str:
    """Path of the stand-in; its server ends with this process. `variables`: set while the server imports, as `TRITON_INTERPRET="1"`;
    programs must be given them too."""
    directory = tempfile.TemporaryDirectory(prefix="warm-python-")
    atexit.register(directory.cleanup)
    address, stand_in, client = (str(Path(directory.name) / name) for name in ("server", "python", "client.py"))
    closed, held_open = os.pipe()  # closed by whatever ends this process
    paths = os.pathsep.join(filter(None, [str(ROOT), ENVIRONMENT.get("PYTHONPATH")]))
    # A fork cannot use CUDA where the server has initialised it.
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    server = subprocess.Popen(
        [INTERPRETER, __file__, address, str(closed)], env=ENVIRONMENT | own | variables, pass_fds=(closed,), stdout=subprocess.PIPE
    )  # fmt: skip
    os.close(closed)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the server has not started"
    atexit.register(server.wait)
    atexit.register(os.close, held_open)
    Path(client).write_text(CLIENT.format(address=address))
    Path(stand_in).write_text(STAND_IN.format(python=INTERPRETER, client=client))
    Path(stand_in).chmod(0o700)
    return stand_in


def torchrun(
    processes: int, *arguments: object, timeout: float = 200, warm: bool = True, interpret: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a program in several processes of one thread, which see no GPU; `interpret`: with Triton's interpreter, where they are warm."""
    mode = {"TRITON_INTERPRET": "1"} if interpret else {}
    interpreter = python(**mode) if warm else INTERPRETER
    command = [interpreter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    own = {"PYTHON_EXEC": interpreter, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, *map(str, arguments)], env=os.environ | own | mode | variables, capture_output=True, text=True, timeout=timeout
    )  # fmt: skip


# ---------------------------------------------------------------- the server
def serve(address: str, closed: int) -> None:
    """Fork for everyone that connects to `address`, until the other end of the pipe `closed` is closed."""
    for name in PRELOADED:
        __import__(name)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    # A byte for every signal, so that the loop wakes when a program has ended.
    woken, wakes = socket.socketpair()
    woken.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    clients: dict[int, socket.socket] = {}  # by the process of their program
    waiting = selectors.DefaultSelector()
    for file in (listening, woken, closed):
        waiting.register(file, selectors.EVENT_READ)
    print("ready", flush=True)
    try:
        while closed not in (ready := [key.fileobj for key, _ in waiting.select()]):
            if woken in ready:
                woken.recv(4096)
            for pid in list(clients):
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    waiting.unregister(clients[pid])
                    with clients.pop(pid) as client:
                        _send(client, os.waitstatus_to_exitcode(ended[1]))
            for pid, client in clients.items():
                if client in ready:  # nothing is ever sent there: it was killed
                    os.kill(pid, signal.SIGKILL)
            if listening not in ready:
                continue
            client, _ = listening.accept()
            try:
                descriptors, request = _receive(client)
            except (OSError, EOFError, ValueError):  # it was killed before it had asked
                client.close()
                continue
            if pid := os.fork():
                for descriptor in descriptors:
                    os.close(descriptor)
                clients[pid] = client
                waiting.register(client, selectors.EVENT_READ)
                _send(client, pid)
            else:
                signal.set_wakeup_fd(-1)
                for connection in (listening, woken, wakes, client, *clients.values()):
                    connection.close()
                waiting.close()
                os.close(closed)
                _run(descriptors, *request)
    finally:
        for pid in clients:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _send(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # it was killed
        client.sendall(number.to_bytes(8, "little", signed=True))


def _receive(client: socket.socket) -> tuple[list[int], tuple[list[str], dict[str, str], str]]:
    client.settimeout(10)
    head, descriptors, _, _ = socket.recv_fds(client, 8, 3)
    size, request = int.from_bytes(head, "little"), b""
    while len(request) < size or not size:
        if not (more := client.recv(size - len(request))):
            raise EOFError
        request += more
    return list(descriptors), json.loads(request)


# ---------------------------------------------------------------- a program
def _run(descriptors: list[int], command: list[str], environment: dict[str, str], directory: str) -> None:
    """What the `command` of an interpreter and its arguments does, then the end of this process."""
    code = 1
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(directory)
        servers = [str(Path(__file__).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
        os.environ.clear()
        os.environ.update(environment)
        rest = [path for path in sys.path if path not in servers]
        sys.path[:] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path] + rest
        sys.executable, *arguments = command
        if arguments[0] == "-u" or environment.get("PYTHONUNBUFFERED"):
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        _start(arguments[arguments[0] == "-u" :])
        code = 0
    except SystemExit as error:
        code = error.code & 255 if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        code = -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the end of an interpreter does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            if code < 0:
                signal.signal(-code, signal.SIG_DFL)
                signal.raise_signal(-code)
            os._exit(code)


def _start(arguments: list[str]) -> None:
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
        if not hasattr(sys.modules.get(rest[0]), "__path__"):  # which runpy would warn of
            sys.modules.pop(rest[0], None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind.startswith("-"):
        sys.exit(f"warm_python does not know {kind}")
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
