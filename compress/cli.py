"""The command line. Exit codes: 0 done, 1 failed, 2 the request was wrong, 130 interrupted, 143 or 129 stopped (SIGTERM, SIGHUP).

Every command is a module of `compress.commands` with a function of its name. Only the module of the command that was typed is
imported; `--help` and completion import all of them, which stays cheap because they import torch inside their functions.
"""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import json
import logging
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import typer

from compress import __version__
from compress.core.stopping import Stopped, stoppable
from runtime.config.messages import did_you_mean
from runtime.errors import CompressError

INTERRUPTED = 130
COMMANDS = (
    "apply", "plan", "sweep", "eval", "inspect", "bench", "tune", "draft", "export", "generate", "chat", "report", "push", "recipes",
    "methods",
)  # fmt: skip

_RESUME = "; finished work is kept: run the same command with --resume to continue"
#: How an interrupted command continues.
_CONTINUE = {"apply": _RESUME, "draft": _RESUME.replace(" with --resume", ""), "sweep": _RESUME}

_HELP = """Compress Hugging Face checkpoints once, offline; run the artifact anywhere.

\b
Start here:
  compress recipes                            ready recipes
  compress plan  llama_w4_sparse              what a recipe would do, without running it
  compress apply llama_w4_sparse              compress the bundled model
  compress generate out/llama_w4_sparse "def read_lines(path):"
  compress export --target onnx               write it for another engine
"""


def build(commands: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with the given commands."""
    app = typer.Typer(
        name="compress", help=_HELP, pretty_exceptions_enable=False, rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip

    @app.callback()
    def options(
        version: bool = typer.Option(False, "--version", help="Print the version.", callback=_version, is_eager=True),
        debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error; can stand anywhere."),
    ) -> None:
        pass

    for name in commands:
        module = importlib.import_module(f"compress.commands.{name}")
        if not hasattr(module, "show"):
            app.command(name)(getattr(module, name))
            continue
        group = typer.Typer(invoke_without_command=True)
        group.callback()(getattr(module, name))
        group.command("show")(module.show)
        app.add_typer(group, name=name)
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code; every error is one sentence on stderr (with `--json`, also on stdout)."""
    # The last collection of a process takes a second over torch and transformers, and frees nothing.
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    debug = "--debug" in options
    if debug:
        given.remove("--debug")
    hint = _CONTINUE.get(given[0], "") if given else ""
    try:
        with stoppable(), _log_shown(quiet=bool({"--quiet", "-q"} & set(options))):
            code = _run(given)
        sys.stdout.flush()
        if code != INTERRUPTED:
            return code
        raise KeyboardInterrupt  # some versions of typer turn it into this exit code, others into Abort
    except (KeyboardInterrupt, typer.Abort):
        return _fail(f"interrupted{hint}", INTERRUPTED, options, debug)
    except Stopped as stop:
        with suppress(OSError):  # after SIGHUP the terminal is gone
            _fail(f"stopped by {stop.signal}{hint}", stop.code, options, debug)
        return stop.code
    except BrokenPipeError:
        # The reader of stdout (`head`, say) is gone. Python would raise again when it flushes at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except CompressError as error:
        return _fail(str(error), error.exit_code, options, debug)
    except MemoryError:
        return _fail("out of memory; reduce calibration.batch_size or calibration.sequence_length", 1, options, debug)
    except OSError as error:
        return _fail(_os_error(error), 1, options, debug)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer's own errors, whose module differs between its versions
            return _fail(_usage(error), 2, options, debug)
        if type(error).__name__ == "OutOfMemoryError":
            text = "the device is out of memory; reduce calibration.batch_size, or use --device cpu"
            return _fail(text, 1, options, debug)
        first = (str(error).strip().splitlines() or [""])[0]
        hint = "" if debug else "; --debug shows the traceback"
        return _fail(f"unexpected {type(error).__name__}: {first}{hint}", 1, options, debug)


@contextmanager
def _log_shown(quiet: bool) -> Iterator[None]:
    """Notes of the log on what takes long (the first compilation of the kernels) go to stderr."""
    log = logging.getLogger("compress.native")
    level, handler = log.level, logging.StreamHandler()
    if not quiet:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _run(arguments: list[str]) -> int:
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    if command is not None and arguments[0] == command and command not in COMMANDS:
        _say(f"no command '{command}'{did_you_mean(command, COMMANDS) or '.'} Commands: {', '.join(COMMANDS)}")
        if "--json" in arguments:
            print(json.dumps({"error": f"no command '{command}'", "exit_code": 2}))
        return 2
    arguments = arguments or ["--help"]
    wanted = (command,) if command in COMMANDS and arguments[0] == command else COMMANDS
    try:
        result = build(wanted)(args=arguments, prog_name="compress", standalone_mode=False, obj=arguments)
    except typer.Exit as stop:
        return stop.exit_code
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int, arguments: list[str], debug: bool) -> int:
    if debug:
        traceback.print_exc()
    _say(message)
    if "--json" in arguments:
        print(json.dumps({"error": message, "exit_code": code}), flush=True)
    return code


def _say(message: str) -> None:
    print(f"compress: {message}", file=sys.stderr)


def _usage(error: BaseException) -> str:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "compress"
    message = error.format_message().strip()  # type: ignore[attr-defined]
    return f"{message.rstrip('.')}; see '{where} --help'"


def _os_error(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full{where}; free some space, then run the same command with --resume"
    return f"{error.strerror or error}{where}"


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


if __name__ == "__main__":
    sys.exit(main())
