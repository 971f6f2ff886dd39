"""C sources in parts that are compiled at the same time, by one thread of several, by one process of several, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.errors import RequestError
from runtime.kernels.cpu import library
from runtime.system import native

COMPILER = native.find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
PLAIN: tuple[tuple[str, ...], ...] = ((),)
SOURCE = """
#if PART == 0
extern int half(int);
int whole(int x) { return 2 * half(x); }
#else
__attribute__((visibility("hidden"))) int half(int x) { return x / 2 + WRONG; }
#endif
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In a folder of its own; a compiler that notes how often it is called, and an empty cache."""
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nsleep 0.2\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    native._library.cache_clear()
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "two.c").write_text(SOURCE.replace("WRONG", "0"))
    yield folder / "two.c"
    native._library.cache_clear()


def calls(source: Path) -> list[str]:
    return source.parents[1].joinpath("calls").read_text().splitlines()


def test_parts_make_one_library(source: Path) -> None:
    with ThreadPoolExecutor(4) as pool:  # of threads that ask at once one compiles
        found = list(pool.map(lambda _: native.library(source, PLAIN, (0, 1)), range(4)))
    assert found[0] is not None
    assert found[0].whole(7) == 6
    assert all(each is found[0] for each in found)
    assert len(calls(source)) == 3
    assert [file.suffix for file in Path(os.environ["COMPRESS_CACHE"], "native").iterdir()] == [".so"]
    native._library.cache_clear()
    assert native.library(source, PLAIN, (0, 1)) is not None
    assert len(calls(source)) == 3  # it is found


def test_a_part_that_does_not_compile_is_one_sentence(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text(SOURCE)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: native.library(source, PLAIN, (0, 1)), range(3))) == [None] * 3
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("two.c could not be compiled (")
    assert said[0].endswith("): it runs in torch, which is slower")
    assert list(Path(os.environ["COMPRESS_CACHE"], "native").iterdir()) == []


def test_processes_that_compile_at_once_all_have_it(source: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runtime.system import native\n"
        "print(native.library(Path(sys.argv[1]), ((),), (0, 1)).whole(9))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = [
        subprocess.Popen([sys.executable, "-c", code, source], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate()[0] for each in running] == ["8\n", "8\n"]
    assert [each.returncode for each in running] == [0, 0]
    assert [file.suffix for file in Path(os.environ["COMPRESS_CACHE"], "native").iterdir()] == [".so"]


def test_what_is_begun_is_waited_for(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setattr(library, "PARTS", (0, 1))
    monkeypatch.setattr(library, "declare", lambda found: None)
    monkeypatch.setenv("COMPRESS_ISA", "portable")
    library.load.cache_clear()
    library._begin.cache_clear()
    try:
        library.begin()
        found = library.load()
        assert found is not None
        assert found.whole(5) == 4
        assert len(calls(source)) == 3
        library.begin()  # there is nothing to begin
        assert len(calls(source)) == 3
        library.load.cache_clear()
        monkeypatch.setenv("COMPRESS_ISA", "wrong")
        library.begin()
        with pytest.raises(RequestError, match="COMPRESS_ISA=wrong"):
            library.load()
    finally:
        library.load.cache_clear()
        library._begin.cache_clear()


BEGUN = """
import os, signal, sys, time
from pathlib import Path
os.environ["COMPRESS_ISA"] = "portable"
from runtime.kernels.cpu import library
library.SOURCE, library.PARTS, library.declare = Path(sys.argv[1]), (0, 1), lambda found: None
library.begin()
"""


def begun(source: Path, then: str) -> subprocess.CompletedProcess[str]:
    """A process that lets a compiler of 0.2 s a call begin, and goes on with `then`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", BEGUN + then, str(source)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_process_ends_while_it_compiles(source: Path) -> None:
    source.parents[1].joinpath("cc").write_text("#!/bin/sh\nexec sleep 60\n")
    start = time.monotonic()
    found = begun(source, "raise SystemExit(3)")
    assert (found.returncode, found.stderr) == (3, "")
    assert time.monotonic() - start < 50


def test_an_interrupt_does_not_reach_the_compiler(source: Path) -> None:
    then = (
        "os.setpgid(0, 0)\n"
        "try: time.sleep(0.1); os.killpg(0, signal.SIGINT); time.sleep(5)\n"
        "except KeyboardInterrupt: print(library.load().whole(5))\n"
    )
    found = begun(source, then)
    assert (found.stdout, found.stderr) == ("4\n", "")
