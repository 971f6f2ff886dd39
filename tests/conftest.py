"""Fixtures that all tests share: tiny random checkpoints with a tokenizer of their own, an artifact of one, the bundled checkpoint."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports the hub client: no test may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# One thread a process, in the processes that tests start too: the models are tiny, so that a second thread mostly waits for the
# first, and `pytest -n 2` uses the other core better.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# They import the same files again and again, also where the user's own processes keep no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import report_charts
import torch
import warm_python
from byte_tokenizers import plain_byte_tokenizer
from random_models import UNLIMITED, random_llama

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

TEXT = "".join(f"line {i}: the square of {i} is {i * i}, and its double is {2 * i}.\n" for i in range(400))


@pytest.fixture(scope="session", autouse=True)
def quick_runs() -> Iterator[None]:
    """Recipes that tests run in this process wait for no disk, since no test can see whether data has reached it, and draw no charts."""
    with pytest.MonkeyPatch.context() as patch, report_charts.undrawn():
        patch.setattr(os, "fsync", os.fstat)  # which refuses the same descriptors
        yield


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the project starts come from `warm_python`, whose docstring says when not to use it."""
    monkeypatch.setattr(sys, "executable", warm_python.python())


@pytest.fixture
def drawn_charts() -> Iterator[None]:
    """Charts of reports are drawn, which `quick_runs` leaves empty."""
    with report_charts.drawn():
        yield


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_llama(**config)`: directory of a random Llama (hidden 64, 2 layers, 257 tokens, bfloat16). Made once for each
    configuration and shared: copy it before you change it. `seed=1` gives other weights."""
    made: dict[str, Path] = {}

    def make(seed: int = 0, **changes: Any) -> Path:
        key = repr((seed, sorted(changes.items())))
        if key not in made:
            made[key] = _save_llama(tmp_path_factory.mktemp("tiny-llama"), seed, changes)
        return made[key]

    return make


def _save_llama(path: Path, seed: int, changes: dict[str, Any]) -> Path:
    model = random_llama(seed, **{"tie_word_embeddings": True, "eos_token_id": 256, **changes})
    model.to(torch.bfloat16).save_pretrained(path)
    plain_byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of some 20 kB with structure in it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_artifact(tiny_llama: Callable[..., Path], tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of `tiny_llama()`: 4 bits, rounded to nearest, evaluated on `tiny_text`. Copy it before you change it."""
    import compress

    recipe = {
        "name": "tiny_w4",
        "model": str(tiny_llama()),
        "stages": [{"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}],
        "evaluate": {
            **UNLIMITED,
            "data": str(tiny_text),
            "sequence_length": 64,
            "samples": 8,
            "max_perplexity_increase": "300%",
        },
    }
    with report_charts.drawn():
        return compress.apply(recipe, output=tmp_path_factory.mktemp("tiny-artifact") / "tiny_w4", quiet=True).path


@pytest.fixture(scope="session")
def bundled() -> Path:
    """The checkpoint that comes along. Read only."""
    from compress.core.resources import recipes_directory

    return recipes_directory() / "checkpoints" / "stdlib-4m"


#: Files, and folders, whose fixtures take long: all tests of one run in one process.
TOGETHER = (
    "tests/recipes/", "tests/extension/", "tests/export/test_triton.py", "tests/export/test_onnx_runtime.py",
    "tests/runtime/drafting/test_drafters_heads.py", "tests/runtime/kernels/cpu/test_sanitizers.py",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests go to the process that is free, one by one, and those of an entry of `TOGETHER` in one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((place for place in TOGETHER if nodeid.startswith(place)), nodeid)

    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.sampled(n)`: n cases of a large matrix, spread evenly, run always, the others are slow. `sampled(n, m)`: m of them
    are slow; those left are exhaustive and run only where `-m` names that marker."""
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            cases.setdefault((item.path, item.nodeid.partition("[")[0]), []).append(item)
    left_out: set[pytest.Item] = set()
    for found in cases.values():
        marker = found[0].get_closest_marker("sampled")
        assert marker is not None
        quick = spread(found, marker.args[0])
        slow = [item for item in found if item not in quick]
        if len(marker.args) > 1:
            # Not from the same one on in all tests: those of the same cases would all leave out the same ones.
            slow = spread(slow, marker.args[1], zlib.crc32(found[0].name.partition("[")[0].encode()))
        for item in found:
            if item in slow:
                item.add_marker(pytest.mark.slow)
            elif item not in quick:
                item.add_marker(pytest.mark.exhaustive)
                left_out.add(item)
    if "exhaustive" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def spread(items: list[pytest.Item], count: int, first: int = 0) -> list[pytest.Item]:
    """So many of them, at even distances from `first` on, around the end; all where there are no more."""
    if count >= len(items):
        return items
    return [items[(first + index * len(items) // count) % len(items)] for index in range(count)]
