"""Concurrent requests of every kind on one model in C, some of them cancelled, with a cache too small for all at once."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing
from typing import Any

import pytest
from inside_cases import SETTINGS, gentle, with_drafter
from test_policy_matrix import held, texts

from runtime.api.model import Model
from runtime.kernels.cpu import library
from runtime.kernels.cpu.attention import PAGE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library.load() is None, reason="needs a C compiler")]

SECONDS = 10
NEW = 60
DRAFTERS: dict[str, dict[str, Any]] = {
    "int4": {"method": "recycling"},
    "int8, nothing recent": {"method": "lookup"},
    "fp8 after four tokens": {"method": "suffix"},
    "int2 values": SETTINGS["skip"],
    "int4 on disk, quest": {"method": "recycling"},
}


class Requests:
    """One thread's: random ones until it is time; what they gave is compared with what each prompt gives alone."""

    def __init__(
        self, model: Model, alone: list[tuple[list[int], list[int]]], seed: int, end: float, memory: int
    ) -> None:
        """`memory`: bytes that are enough for one prompt."""
        self.model, self.alone, self.end, self.memory = model, alone, end, memory
        self.draw = random.Random(seed)
        self.done: dict[str, int] = {}
        self.wrong: list[str] = []

    def run(self) -> None:
        """Never raises: the failure is in `wrong`."""
        while time.monotonic() < self.end:
            kind = self.draw.choice((self.batch, self.bounded, self.left, self.cancelled))
            try:
                right = kind(self.draw.sample(self.alone, self.draw.randint(1, 4)), self.draw.randint(1, NEW))
            except Exception as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")
                continue
            self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
            if not right:
                self.wrong.append(kind.__name__)

    def batch(self, some: list[tuple[list[int], list[int]]], new: int, **options: Any) -> bool:
        found = self.model.generate([prompt for prompt, _ in some], max_new_tokens=new, **options)
        return bool(found == [answer[:new] for _, answer in some])

    def bounded(self, some: list[tuple[list[int], list[int]]], new: int) -> bool:
        return self.batch(some, new, cache_memory=self.memory)

    def left(self, some: list[tuple[list[int], list[int]]], new: int) -> bool:
        prompt, answer = some[0]
        with closing(self.model.stream(prompt, max_new_tokens=NEW)) as stream:
            found = [token for token, _ in zip(stream, range(new // 2), strict=False)]
        return found == answer[: len(found)]

    def cancelled(self, some: list[tuple[list[int], list[int]]], new: int) -> bool:
        cancel = threading.Event()
        timer = threading.Timer(self.draw.random() * 0.1, cancel.set)
        timer.start()
        found = self.model.generate([prompt for prompt, _ in some], max_new_tokens=NEW, cancel=cancel)
        timer.cancel()
        return all(mine == answer[: len(mine)] for mine, (_, answer) in zip(found, some, strict=True))


@pytest.fixture(scope="module")
def module() -> Any:
    return gentle(head_dim=32, max_position_embeddings=1024)


@pytest.mark.parametrize("policy", DRAFTERS)
def test_every_answer_is_that_of_its_prompt_alone(module: Any, policy: str) -> None:
    alone = [(prompt, held(module, policy).generate(prompt, max_new_tokens=NEW)) for prompt in texts(12, seed=7)]
    model = held(module, policy)
    with_drafter(model, DRAFTERS[policy])
    engine = model.engine
    longest = -(-(max(len(prompt) for prompt, _ in alone) + NEW) // PAGE) + sum(engine.overhead)
    engine.cache_budget = 2 * longest * engine.page_bytes
    end = time.monotonic() + SECONDS
    requests = [Requests(model, alone, seed, end, longest * engine.page_bytes) for seed in range(4)]
    threads = [threading.Thread(target=each.run) for each in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [wrong for each in requests for wrong in each.wrong]
    assert all(each.done.keys() == {"batch", "bounded", "left", "cancelled"} for each in requests)
    pages = model._scheduler.batch.pages  # type: ignore[union-attr]
    assert pages is None or (pages.sequences, pages.available) == (0, pages.count - engine.overhead.step)
