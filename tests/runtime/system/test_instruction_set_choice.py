"""`COMPRESS_ISA`: which instruction set the C kernels are compiled for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from compress.cli import main
from runtime.errors import RequestError
from runtime.kernels import tuning
from runtime.kernels.cpu import integer, library
from runtime.kv_cache.kernels import cpu as attention
from runtime.system import instruction_sets, native, processes
from runtime.system.device import choose_device

AVX512 = instruction_sets.X86["avx512"].needs
AVX2 = instruction_sets.X86["avx2"].needs
AMX = instruction_sets.X86["amx"].needs
NAMES = {"amx": b"amx", "avx512": b"avx512-vnni", "avx2": b"avx2", "portable": b"portable"}


def kernel_grants(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    amx = instruction_sets.X86["amx"]._replace(granted=lambda: tiles)
    monkeypatch.setitem(instruction_sets.X86, "amx", amx)


@pytest.mark.parametrize(
    ("flags", "forced", "expected"),
    [
        (AMX | AVX2, None, "amx"),
        (AMX | AVX2, "avx512", "avx512"),
        (AMX - {"amx_int8"} | AVX2, None, "avx512"),
        (AVX512 | AVX2, None, "avx512"),
        (AVX512 | AVX2, "", "avx512"),
        (AVX512 | AVX2, "avx2", "avx2"),
        (AVX512 | AVX2, "portable", "portable"),
        (AVX2, None, "avx2"),
        (AVX2, "portable", "portable"),
        (frozenset(), None, "portable"),
    ],
)
def test_the_best_or_the_forced_one(flags, forced, expected, monkeypatch):
    kernel_grants(True, monkeypatch)
    monkeypatch.setattr(processes, "flags", lambda: flags)
    monkeypatch.setenv("COMPRESS_ISA", forced) if forced is not None else monkeypatch.delenv("COMPRESS_ISA", False)
    assert instruction_sets.chosen() == expected
    assert instruction_sets.preferred() == expected
    assert instruction_sets.forced() == (forced or None)


def test_a_kernel_that_grants_no_tiles(monkeypatch):
    kernel_grants(False, monkeypatch)
    monkeypatch.setattr(processes, "flags", lambda: AMX | AVX2)
    monkeypatch.delenv("COMPRESS_ISA", False)
    assert instruction_sets.chosen() == "avx512"
    monkeypatch.setenv("COMPRESS_ISA", "amx")
    with pytest.raises(RequestError, match=r"=amx: this machine cannot run it; use avx512, avx2, portable"):
        instruction_sets.chosen()


def test_the_kernel_is_asked_for_tiles():
    """It grants them exactly where the CPU has them (and it lets them be used), however often it is asked."""
    asked = processes.grants_tiles.__wrapped__
    assert asked() == asked() == processes.grants_tiles()
    if "amx_tile" not in processes.flags():
        assert not asked()


@pytest.mark.skipif(native.find_compiler() is None, reason="needs a C compiler")
def test_a_compiler_without_amx(monkeypatch, tmp_path, caplog):
    """Said once, and the kernels are those of AVX-512, as the library says of itself."""
    old = tmp_path / "cc"
    old.write_text(f'#!/bin/sh\ncase "$*" in *-mamx-tile*) exit 1;; esac\nexec {native.find_compiler()} "$@"\n')
    old.chmod(0o700)
    monkeypatch.setenv("CC", str(old))
    monkeypatch.setattr(native, "library", native._library.__wrapped__)
    monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))
    found = library.load.__wrapped__("amx")
    assert found.isa_name() == NAMES["avx512"]
    assert [record.message for record in caplog.records if "AMX" in record.message] != []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("avx9", "COMPRESS_ISA=avx9: there is no such instruction set; use avx2, portable, or leave it unset"),
        ("avx512", "COMPRESS_ISA=avx512: this machine cannot run it; use avx2, portable, or leave it unset"),
        ("AVX2", "COMPRESS_ISA=AVX2: there is no such instruction set; use avx2, portable, or leave it unset"),
    ],
)
def test_what_this_machine_does_not_have_is_refused(name, said, monkeypatch, capsys):
    monkeypatch.setattr(processes, "flags", lambda: AVX2)
    monkeypatch.setenv("COMPRESS_ISA", name)
    for refused in (instruction_sets.chosen, library.load.__wrapped__, native.tunings, lambda: choose_device("auto")):
        with pytest.raises(RequestError) as error:
            refused()
        assert str(error.value) == said
    assert instruction_sets.preferred() == "avx2"
    for command in (["generate", "/nowhere", "text", "--device", "cpu"], ["apply", "llama_w4", "--device", "cpu"]):
        assert main(command) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_wrong_name_does_not_break_the_import():
    environment = {**os.environ, "COMPRESS_ISA": "wrong", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = "import runtime, runtime.kernels; from runtime.system import instruction_sets; instruction_sets.chosen()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1].startswith("runtime.errors.RequestError: COMPRESS_ISA=wrong")


@pytest.mark.skipif(native.find_compiler() is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", instruction_sets.available())
def test_every_library_is_compiled_for_the_forced_one(name, monkeypatch):
    """The names of their files hold the flags: the libraries of one instruction set are those of no other."""
    best = {load: load.__wrapped__()._name for load in (library.load, attention.load)}
    best_machine = tuning.machine.__wrapped__()
    monkeypatch.setenv("COMPRESS_ISA", name)
    monkeypatch.setattr(native, "library", native._library.__wrapped__)  # it remembers
    forced = library.load.__wrapped__()
    assert forced.isa_name() == NAMES[name]
    assert (forced._name == best[library.load]) == (name == instruction_sets.available()[0])
    assert attention.load.__wrapped__()._name != best[attention.load]
    assert tuning.machine.__wrapped__() != best_machine
    assert f"({name})" in integer.KERNELS[0].path(1)
    assert choose_device("cpu").type == "cpu"
