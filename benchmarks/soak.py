"""Random requests on one loaded model for a long time: memory must stay flat, answers the same, and nothing unexpected happen.

    python benchmarks/soak.py [--minutes 30] MODEL

Texts and ids of random lengths and options, batches, streams read to the end or left half way, wrong requests, callbacks that
raise, and all of that from several threads at once. Prints one JSON object; exits 1 after an unexpected error or a wrong answer.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil

import runtime
from runtime.api.model import Model
from runtime.errors import RequestError

TEXT = "import os def main class return self value for in range open path the a of not is None True # : ( ) = + 東京 🙂 é \n"
WORDS = TEXT.split(" ")
LONGEST_PROMPT = 120
MOST_NEW = 24


class StopHereError(Exception):
    """Raised by a callback on purpose."""


class Soak:
    """Makes random requests and keeps count.

    Attributes:
        done: requests by kind. errors: unexpected ones, as text. wrong: answers that changed.
    """

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.seed = seed
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []
        self.wrong = 0
        self._vocab = model.engine.vocab_size
        self._known = [(ids, model.generate(ids, max_new_tokens=12)) for ids in self._fixed()]
        self._kinds: list[Callable[[random.Random], None]] = [
            self.generate, self.batch, self.many_stops, self.stream, self.leave_stream, self.likelihood, self.wrong_request,
            self.callback_raises, self.same_answer,
        ]  # fmt: skip

    def _fixed(self) -> list[list[int]]:
        chance = random.Random(self.seed)
        return [self._ids(chance) for _ in range(4)]

    def one(self, chance: random.Random) -> None:
        """One random request; whatever it raises is recorded."""
        kind = chance.choice(self._kinds)
        try:
            kind(chance)
        except Exception as error:
            self.errors.append(f"{kind.__name__}: {type(error).__name__}: {error}"[:300])
        self.done[kind.__name__] += 1

    # ---------------------------------------------------------------- kinds
    def generate(self, chance: random.Random) -> None:
        self.model.generate(self._prompt(chance), **self._options(chance))

    def batch(self, chance: random.Random) -> None:
        common = self._ids(chance)
        prompts = [
            common[: chance.randint(1, len(common))] + self._ids(chance)[:40] for _ in range(chance.randint(2, 24))
        ]
        self.model.generate(prompts, **self._options(chance))

    def many_stops(self, chance: random.Random) -> None:
        stops = ["".join(chance.choices(WORDS, k=4)) for _ in range(chance.choice([1, 10, 3000]))]
        self.model.generate(self._text(chance), stop=[stop or "x" for stop in stops], **self._options(chance))

    def stream(self, chance: random.Random) -> None:
        prompt, options = self._text(chance), {**self._options(chance), "seed": 3}
        if "".join(self.model.stream(prompt, **options)) != self.model.generate(prompt, **options):
            self.wrong += 1

    def leave_stream(self, chance: random.Random) -> None:
        stream = self.model.stream(self._prompt(chance), **self._options(chance))
        for _ in range(chance.randint(0, 5)):
            next(stream, None)
        if chance.random() < 0.5:
            stream.close()

    def likelihood(self, chance: random.Random) -> None:
        ids = self._ids(chance)
        self.model.score([*ids, 1])
        self.model.logits([ids])

    def wrong_request(self, chance: random.Random) -> None:
        prompt, options = chance.choice(
            [([], {}), ([-1], {}), ("", {}), ([self._vocab], {}), ([5], {"top_p": 2}), ([5], {"max_new_tokens": 10**15}),
             ([5], {"stop": [""]}), (["a", 5], {}), ([5], {"temperature": float("nan")}), ("\ud800", {}), (None, {})]
        )  # fmt: skip
        try:
            self.model.generate(prompt, **options)
        except RequestError:
            return
        raise AssertionError(f"{prompt!r} with {options} was not refused")

    def callback_raises(self, chance: random.Random) -> None:
        limit = chance.randint(0, 3)

        def progress(done: int, total: int) -> None:
            if done >= limit:
                raise StopHereError

        try:
            self.model.generate([self._ids(chance) for _ in range(6)], progress=progress, **self._options(chance))
        except StopHereError:
            return
        raise AssertionError("the callback's exception was lost")

    def same_answer(self, chance: random.Random) -> None:
        ids, expected = chance.choice(self._known)
        if self.model.generate(ids, max_new_tokens=12) != expected:
            self.wrong += 1

    # ---------------------------------------------------------------- parts of a request
    def _ids(self, chance: random.Random) -> list[int]:
        longest = min(LONGEST_PROMPT, (self.model.engine.context_length or 10**9) // 2 - MOST_NEW)
        return [chance.randrange(self._vocab) for _ in range(chance.randint(1, longest // 2))]

    def _text(self, chance: random.Random) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, 12))) + "."

    def _prompt(self, chance: random.Random) -> Any:
        return self._text(chance) if chance.random() < 0.5 else self._ids(chance)

    def _options(self, chance: random.Random) -> dict[str, Any]:
        options: dict[str, Any] = {"max_new_tokens": chance.randint(1, MOST_NEW)}
        if chance.random() < 0.5:
            options.update(temperature=chance.choice([1e-9, 0.5, 1.0, 2.0]), seed=chance.randrange(2**40))
            options.update(chance.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}]))
        if chance.random() < 0.3:
            options["repetition_penalty"] = chance.choice([0.8, 1.3])
        if chance.random() < 0.3:
            options["ignore_eos"] = True
        return options


def run(soak: Soak, seconds: float, most_threads: int = 4) -> list[tuple[float, int]]:
    """Requests for so long; returns (seconds, resident bytes) at even intervals."""
    process, chance = psutil.Process(), random.Random(soak.seed)
    started = time.monotonic()
    samples: list[tuple[float, int]] = []
    every = max(0.2, seconds / 600)
    while (now := time.monotonic() - started) < seconds:
        if not samples or now - samples[-1][0] >= every:
            samples.append((now, process.memory_info().rss))
        seeds = [chance.randrange(2**40) for _ in range(chance.choice([1, 1, 1, 2, most_threads]))]
        if len(seeds) == 1:
            soak.one(random.Random(seeds[0]))
            continue
        threads = [threading.Thread(target=soak.one, args=(random.Random(seed),)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    gc.collect()
    samples.append((time.monotonic() - started, process.memory_info().rss))
    return samples


def slope(samples: list[tuple[float, int]]) -> float:
    """MB an hour by least squares, the first third left out."""
    kept = [(t, b) for t, b in samples if t >= samples[-1][0] / 3]
    mean_t = sum(t for t, _ in kept) / len(kept)
    mean_b = sum(b for _, b in kept) / len(kept)
    spread = sum((t - mean_t) ** 2 for t, _ in kept)
    return sum((t - mean_t) * (b - mean_b) for t, b in kept) / spread * 3600 / 1e6 if spread else 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="an artifact or checkpoint directory")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-slope", type=float, help="fail when memory grows faster than this many MB an hour")
    request = parser.parse_args(arguments)
    soak = Soak(runtime.load(request.model), request.seed)
    samples = run(soak, request.minutes * 60)
    growth = slope(samples)
    sizes = [size / 1e6 for _, size in samples]
    curve = [(round(t, 1), round(size / 1e6, 1)) for t, size in samples[:: max(1, len(samples) // 60)]]
    result = {
        "minutes": round(samples[-1][0] / 60, 2),
        "engine": type(soak.model.engine).__name__,
        "requests": sum(soak.done.values()),
        "requests_by_kind": dict(soak.done),
        "rss_start_mb": round(sizes[0], 1),
        "rss_end_mb": round(sizes[-1], 1),
        "rss_peak_mb": round(max(sizes), 1),
        "slope_mb_per_hour": round(growth, 2),
        "unexpected_errors": len(soak.errors),
        "first_errors": soak.errors[:5],
        "wrong_answers": soak.wrong,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "seconds_and_rss_mb": curve,
    }
    print(json.dumps(result))
    too_fast = request.most_slope is not None and growth > request.most_slope
    return 1 if soak.errors or soak.wrong or too_fast else 0


if __name__ == "__main__":
    sys.exit(main())
