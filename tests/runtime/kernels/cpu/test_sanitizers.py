"""The C kernels under the compiler's sanitizers, in a program of their own (`sanitized.c`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runtime.kernels.cpu import library
from runtime.system import instruction_sets, native

SOURCE = Path(__file__).with_name("sanitized.c")
COMPILER = native.find_compiler()


def build(folder: Path, source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    command = [*COMPILER.split(), "-std=c11", "-g", *flags, f'-DKERNELS="{library.SOURCE}"', str(source)]
    command += ["-o", str(folder / "program"), "-lm", "-pthread"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    return subprocess.run(
        [folder / "program"], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.parametrize("level", instruction_sets.available()[:2])
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_nothing_is_found(sanitizer, level, tmp_path):
    trial = tmp_path / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    flag = f"-fsanitize={sanitizer}"
    if build(tmp_path, trial, flag).returncode or run(tmp_path).returncode:
        pytest.skip(f"the compiler has no library for {flag} that runs here")
    flags = instruction_sets.tunings(level)[0]
    built = build(tmp_path, SOURCE, "-O1", "-ffp-contract=off", flag, "-fno-sanitize-recover=all", *flags)
    assert built.returncode == 0, built.stderr[-2000:]
    done = run(tmp_path)
    assert done.returncode == 0, (done.stderr or done.stdout)[-3000:]
    assert done.stdout.endswith("326 products\n")
