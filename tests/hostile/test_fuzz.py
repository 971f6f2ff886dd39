"""A few hundred hostile files of every kind, other ones each time (`FUZZ_SEED` repeats them); `benchmarks/fuzz.py` tries any number."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kinds import BOMBS, KINDS, allowed, hostile, make_good, mend
from watching import watch

from compress.recipe import load
from runtime.checkpoint.headers import read_header
from runtime.errors import ArtifactError, CompressError, RequestError

# Those that load a model take some hundred times as long.
INPUTS = {
    name: 4 if "loaded" in name or name in ("tokenizer", "draft", "export.json", "compress.json") else 40
    for name in KINDS
}
MORE = int(os.environ.get("FUZZ_MORE") or 1)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("fuzz").resolve()
    make_good(path)
    logging.disable(logging.CRITICAL)
    yield path
    logging.disable(logging.NOTSET)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_hostile_files(name: str, room: Path) -> None:
    seed = int(os.environ.get("FUZZ_SEED") or time.time_ns())
    print(f"FUZZ_SEED={seed} repeats these inputs")
    kind = KINDS[name]
    kind.read(room / kind.directory)  # the good one is read, and what is imported once is no input's
    for number in range(INPUTS[name] * MORE):
        directory, file = hostile(kind, room, random.Random(f"{name} {seed + number}"))
        outcome = watch(kind.read, directory, allowed(room))
        mend(kind, room, file)
        assert not outcome.wrong, f"input {number} ({file}): {outcome.kind}: {outcome.text}"


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_recipes_that_are_bombs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Aliases that grow, nesting without end, tags that would run code: refused in a sentence, in no time."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_bytes(BOMBS[number])
    start = time.process_time()
    with pytest.raises(RequestError) as caught:
        load(tmp_path / "recipe.yaml")
    assert time.process_time() - start < 5
    assert 10 < len(str(caught.value)) < 5000
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.yaml"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F8_E4M3", "F31"]) | _JSON,
        "shape": st.lists(st.integers(-2, 2**40), max_size=4) | _JSON,
        "data_offsets": st.lists(st.integers(-2, 64), min_size=1, max_size=3) | _JSON,
    },
)


@pytest.mark.slow
@settings(max_examples=60 * MORE, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.text(max_size=6), _ENTRY | _JSON, max_size=4) | _JSON,
    length=st.none() | st.integers(0, 2**64 - 1),
    data=st.binary(max_size=64),
)
def test_headers_that_hypothesis_makes(tmp_path: Path, header: Any, length: int | None, data: bytes) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    try:
        found = read_header(file)
    except ArtifactError:
        return
    assert sum(entry.nbytes for entry in found.tensors.values()) == len(data)


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    """The tool itself: reading elsewhere, writing, running, hanging on to memory, and errors that are no sentence."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.write_text("secret")
    (inside / "a").write_text("x")

    def refuse(directory: Path) -> None:
        raise CompressError("no")

    def silent(directory: Path) -> None:
        raise CompressError("")

    assert watch(lambda d: (d / "a").read_text(), inside).kind == "read"
    assert watch(refuse, inside).kind == "refused"
    assert watch(silent, inside).kind == "no sentence"
    assert watch(lambda d: outside.read_text(), inside).kind == "escape"
    assert watch(lambda d: (d / "b").write_text("x"), inside).kind == "escape"
    assert watch(lambda d: os.system("true"), inside).kind == "escape"
    assert watch(lambda d: bytearray(2**40), inside).text.startswith("MemoryError")
    assert watch(lambda d: {}["x"], inside).kind == "crash"
    assert watch(lambda d: exec(compile("1", str(d / "evil.py"), "exec")), inside).kind == "escape"
