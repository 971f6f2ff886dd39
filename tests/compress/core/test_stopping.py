"""SIGTERM and SIGHUP: the command ends with 128 and the signal's number, and its cleaning up is done."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import typer

from compress import cli
from compress.core.stopping import Stopped, stoppable

SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])


@pytest.fixture(autouse=True)
def as_a_shell_leaves_them() -> Iterator[None]:
    """Also where the tests run under `nohup`, which ignores SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def kill(number: int) -> None:
    assert signal.getsignal(number) is not signal.SIG_DFL, "it would end the tests"
    os.kill(os.getpid(), number)
    time.sleep(5)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line whose `apply` and `export` kill their own process; the list has what they cleaned up."""
    cleaned: list[str] = []

    def command(number: int, as_json: bool = typer.Option(False, "--json")) -> None:
        try:
            kill(number)
        except Exception:  # as libraries write it
            cleaned.append("wrongly caught")
        finally:
            cleaned.append("cleaned")

    def build(commands: object = ()) -> typer.Typer:
        app = typer.Typer()
        app.callback()(lambda: None)
        for name in ("apply", "export"):
            app.command(name)(command)
        return app

    monkeypatch.setattr(cli, "build", build)
    return cleaned


@SIGNALS
def test_a_command_that_is_stopped(number: int, waiting: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(int(number)), "--json"]) == 128 + number
    assert waiting == ["cleaned"]
    captured = capsys.readouterr()
    name = signal.Signals(number).name
    assert captured.err == f"compress: stopped by {name}\n"
    assert json.loads(captured.out) == {"error": f"stopped by {name}", "exit_code": 128 + number}
    assert signal.getsignal(number) is signal.SIG_DFL


def test_apply_says_how_to_go_on(waiting: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["apply", str(int(signal.SIGTERM))]) == 143
    assert "run the same command with --resume" in capsys.readouterr().err


@SIGNALS
def test_an_ignored_signal_and_a_handler_of_others_stay(number: int) -> None:
    """`nohup` ignores SIGHUP, and who embeds the command line may have a handler."""
    seen: list[int] = []

    def other(number: int, frame: object) -> None:
        seen.append(number)

    for handler in (signal.SIG_IGN, other):
        before = signal.signal(number, handler)
        try:
            with stoppable():
                os.kill(os.getpid(), number)
            assert signal.getsignal(number) is handler
        finally:
            signal.signal(number, before)
    assert seen == [number]


def test_handlers_are_taken_back() -> None:
    with pytest.raises(Stopped), stoppable():
        kill(signal.SIGTERM)
    with stoppable():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_second_signal_does_not_cut_the_cleaning_short() -> None:
    """A terminal that closes may send both."""
    cleaned = []

    def work() -> None:
        try:
            kill(signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            cleaned.append("cleaned")

    with pytest.raises(Stopped) as stopped, stoppable():
        work()
    assert stopped.value.code == 143
    assert cleaned == ["cleaned"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_set_no_handlers() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with stoppable():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
