"""Draft & Verify: which attention and feed-forward halves the artifact can leave out when it drafts for itself, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.distill.draft.checks import Prospect, RefusedError, check_in_c, check_lengths
from compress.distill.draft.config import DraftConfig
from compress.distill.draft.speedup import best_length, tokens_of, worth
from compress.distill.draft.speedup import speedup as speedup_of
from compress.distill.draft.subset_search import Search, Subset, search
from compress.distill.draft.training import DraftMethod, DraftTraining
from runtime.engines.base import Chunk
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.sublayers import View, parts_of
from runtime.errors import RequestError

# How far parts of a model draft what the whole model writes: drafts from places in texts, counted as speculative decoding would.


class DraftTrials:
    """Places in texts from which parts of a model draft, and what the whole model writes there.

    A draft begins where the model's own keys and values end, as it does when texts are written, so what is counted is what speculative
    decoding would accept.

    Args:
        engine: of the model.
        ids: int64 `[n, s]`, texts.
        places: in each, 1 to s - 1, evenly spread over its second half or, where they are too many for it, over all of it.
        tokens: of a draft.

    Attributes:
        written: int64 `[n * places, tokens]`, what the model writes, greedily.
    """

    def __init__(self, engine: NativeEngine, ids: torch.Tensor, places: int, tokens: int) -> None:
        length = int(ids.shape[1])
        self.engine, self.tokens, self._size = engine, tokens, engine.page_size
        first = max(1, min(length // 2, length - places))
        starts = sorted({first + (length - first) * index // places - 1 for index in range(places)})
        shared = -(-length // self._size)
        own = max(-(-(start + tokens) // self._size) - start // self._size for start in starts)
        self._pool = engine.new_pages(len(ids) * (shared + own * len(starts)))
        self._last: list[int] = []
        self._pieces: list[tuple[int, list[int]]] = []
        page = 0
        for row in ids.tolist():
            pages = list(range(page, page + shared))
            page += shared
            for begin in range(0, length, engine.most_rows):
                engine.read(self._pool, [Chunk(row[begin : begin + engine.most_rows], begin, pages)])
            for start in starts:
                mine = list(range(page, page + own))
                page += own
                full = start // self._size
                for tensor in self._pool.tensors:
                    tensor[mine[0]] = tensor[pages[full]]
                self._pieces.append((start, pages[:full] + mine))
                self._last.append(row[start])
        # Token by token; keys and values stay in the places' own pages until a draft overwrites them.
        self.written = torch.zeros(len(self), tokens, dtype=torch.int64)
        for step in range(tokens):
            for group in self._groups(range(len(self))):
                self.written[group, step] = engine.read(self._pool, self._step(group, step)).argmax(-1)

    def __len__(self) -> int:
        return len(self._last)

    def accepted(self, view: View) -> torch.Tensor:
        """How many tokens of each place's draft by a view the model writes itself, before the first that it does not; int64 `[places]`."""
        counts = torch.zeros(len(self), dtype=torch.int64)
        alive = list(range(len(self)))
        for step in range(self.tokens):
            following = []
            for group in self._groups(alive):
                found = view.read(self._pool, self._step(group, step)).argmax(-1)
                right = found == self.written[group, step]
                following += [index for index, each in zip(group, right.tolist(), strict=True) if each]
            counts[following] += 1
            alive = following
        return counts

    def rates(self, view: View) -> list[float]:
        """For each token of a draft, the share of the places that accept it among those that accepted all before it; as far as there are
        any."""
        found = by_position(self.accepted(view), self.tokens)
        return [rate for rate in found if rate is not None]

    def _groups(self, indices: Sequence[int]) -> list[list[int]]:
        size = self.engine.most_rows
        return [list(indices[begin : begin + size]) for begin in range(0, len(indices), size)]

    def _step(self, group: Sequence[int], step: int) -> list[Chunk]:
        """The token before the one that is looked for: all of a draft that was accepted so far is what the model wrote."""
        pieces = []
        for index in group:
            start, pages = self._pieces[index]
            token = self._last[index] if step == 0 else int(self.written[index, step - 1])
            pieces.append(Chunk([token], start + step, pages))
        return pieces


# How often drafts with some halves left out are accepted, as the report has it of every draft.

_ROWS = 8  # whose keys and values are in memory at once


def evenly(layers: int, count: int) -> list[int]:
    """`count` of `layers` layers, evenly spread: what is left out by who has not searched."""
    return [(2 * index + 1) * layers // (2 * count) for index in range(count)]


def measure_views(
    engine: NativeEngine, views: Mapping[str, View], rows: Mapping[str, torch.Tensor], places: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """{name of the view: {kind: what `compress.distill.draft.acceptance.measure_acceptance` returns}}, of greedy drafts after texts.

    Args:
        views: parts of the engine, by name.
        rows: {kind: int64 `[n, s]`}, texts.
        places: drafts begin in each, fewer in short ones. tokens: of a draft.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in views}
    for kind, ids in rows.items():
        counts: dict[str, list[torch.Tensor]] = {name: [] for name in views}
        for part in ids.split(_ROWS):
            trials = DraftTrials(engine, part, min(places, part.shape[1] - 1), tokens)
            for name, view in views.items():
                counts[name].append(trials.accepted(view))
        for name, each in counts.items():
            accepted = torch.cat(each)
            rates, mean = by_position(accepted, tokens), float(accepted.double().mean())
            greedy = {
                "acceptance": rates[0], "by_position": rates, "accepted": mean, "tokens": mean + 1, "steps": len(accepted),
            }  # fmt: skip
            found[name][kind] = {"length": tokens, "text": None, "continuations": {"greedy": greedy}}
    return found


def by_position(counts: torch.Tensor, tokens: int) -> list[float | None]:
    """For each token of a draft the share accepted of those whose predecessors all were; None: never reached.

    Args:
        counts: accepted tokens of drafts, int64 `[n]`.
    """
    reached = [int((counts >= place).sum()) for place in range(tokens + 1)]
    return [float(reached[place + 1]) / reached[place] if reached[place] else None for place in range(tokens)]


_HELD_OUT = 3  # one row of so many


class SkipConfig(BaseModel):
    """The artifact drafts with some of its own attention and feed-forward halves left out. Which ones is found by Bayesian optimisation of
    the tokens a second that drafting with the others promises, measured on what the artifact writes after calibration text. Nothing is
    trained and nothing is stored but their numbers. What is found is measured on other rows, beside as many halves that are evenly spread.
    """

    model_config = ConfigDict(extra="forbid")

    method: Literal["skip"] = Field("skip", description="Name of the method.")
    trials: int = Field(200, ge=1, le=1_000_000, description="Sets of halves that are tried.")
    samples: int = Field(
        24, ge=2, le=1_000_000, description="Rows of calibration text; a third of them is held out of the search."
    )
    sequence_length: int = Field(256, ge=16, le=1_048_576, description="Tokens of a row.")
    places: int = Field(8, ge=1, description="Places in a row from which is drafted.")
    tokens: int = Field(8, ge=1, le=64, description="Tokens of a draft at most.")
    row_cost: float = Field(
        0.0,
        ge=0,
        le=1,
        description="What a further token of a verification takes, as a share of a step; 0: bound by memory.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Of the search.")


@dataclass
class Found:
    """What a search for skipped halves found.

    Attributes:
        skip_attention, skip_mlp: layers, counted from 0.
        rates: for each token of a draft, how often it is accepted where those before it are.
        read: bytes of weights that a drafted token reads. cost: that as a share of what the model reads.
        length: tokens to draft, 0: it does not pay. speedup: that this promises over plain decoding.
        curve: the best speedup after each trial; 1 where none pays that was tried.
    """

    skip_attention: list[int]
    skip_mlp: list[int]
    rates: list[float]
    read: int
    cost: float
    length: int
    speedup: float
    curve: list[float]

    def facts(self) -> dict[str, Any]:
        """For the manifest, JSON-able."""
        return {
            "skip_attention": self.skip_attention, "skip_mlp": self.skip_mlp,
            "cost": {"bytes": self.read, "of_target": self.cost, "tokens": 1},
            "search": {"rates": self.rates, "length": self.length, "speedup": self.speedup, "curve": self.curve},
        }  # fmt: skip


def find_skips(
    engine: NativeEngine, ids: torch.Tensor, config: SkipConfig, told: Callable[[Search], None] | None = None
) -> Found:
    """Search for the halves of layers to leave out: those whose absence makes drafting fastest.

    The value of a set is the speedup of the best draft length (`compress.distill.draft.speedup.best_length`) at the acceptance that is
    measured with it, a drafted token costing the bytes of weights that are left: Draft & Verify (arXiv 2309.08168) with bytes for
    seconds, so that the same rows give the same set on every machine.

    Args:
        engine: of the model, all of it in memory.
        ids: int64 `[n, s]`, texts; see `DraftTrials`.
        told: is called after each trial.

    Raises:
        RequestError: so few trials found nothing.
    """
    layers = len(engine.parts.blocks)
    runs = DraftTrials(engine, ids, config.places, config.tokens)
    whole = View(engine, range(layers)).weight_bytes

    def halves(subset: Subset) -> tuple[list[int], list[int]]:
        """Layers without attention, and without feed-forward half."""
        return [each for each in subset if each < layers], [each - layers for each in subset if each >= layers]

    def measured(subset: Subset) -> tuple[list[float], float]:
        attention, mlp = halves(subset)
        view = View(engine, range(layers), attention, mlp)
        return runs.rates(view), view.weight_bytes / whole

    def value(subset: Subset) -> float:
        if not subset:  # a draft as dear as what it is for
            return 1.0
        rates, cost = measured(subset)
        # Not `best_length`, to which all that does not pay is alike: the way to what does leads through it.
        return max(
            speedup_of(tokens_of(rates[:length]), length, cost, config.row_cost) for length in range(1, len(rates) + 1)
        )

    found = search(value, 2 * layers, config.trials, starts=_starts(layers), seed=config.seed, told=told)
    drafts = {subset: value for subset, value in found.values.items() if 0 < len(subset) < 2 * layers}
    if not drafts:
        raise RequestError(f"{config.trials} trials found no halves to leave out; allow more")
    best = Search(drafts).best
    rates, cost = measured(best)
    length, speedup = best_length(rates, cost, config.row_cost)
    return Found(*halves(best), rates, round(cost * whole), cost, length, speedup, found.curve())


def _starts(layers: int) -> list[list[int]]:
    """Sets worth trying first: every second attention or whole layer between the first and the last, the middle layers, single halves."""
    inner = list(range(1, layers - 1)) or [0]
    middle = inner[len(inner) // 4 : len(inner) - len(inner) // 4]
    second = inner[::2]
    return [
        second,
        inner,
        [*second, *(layers + each for each in second)],
        [*middle, *(layers + each for each in middle)],
    ]


def make(training: DraftTraining, config: SkipConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    engine, count = _engine(training), max(1, len(training.rows) // _HELD_OUT)
    training.reporter.phase("skips", config.trials)

    def told(search: Search) -> None:
        training.reporter.step(f"{len(search.values)} of {config.trials} sets")

    found = find_skips(engine, training.rows[:-count], config, told)
    training.facts |= found.facts()
    layers = range(len(engine.parts.blocks))
    even = [evenly(len(layers), len(skipped)) for skipped in (found.skip_attention, found.skip_mlp)]
    views = {
        "before": View(engine, layers, *even),
        "after": View(engine, layers, found.skip_attention, found.skip_mlp),
    }
    rows = {"held_out": training.rows[-count:], **training.kinds}
    whole, training.facts["worth"] = View(engine, layers).weight_bytes, {}
    training.facts["search"] |= {"evenly": {"skip_attention": even[0], "skip_mlp": even[1]}}
    for when, measured in measure_views(engine, views, rows, config.places, config.tokens).items():
        training.facts[when] = measured
        training.facts["worth"][when] = worth(measured, views[when].weight_bytes / whole, row_cost=config.row_cost)
    return {"method": "skip", "skip_attention": found.skip_attention, "skip_mlp": found.skip_mlp}


def _engine(training: DraftTraining) -> NativeEngine:
    """The decoder in C of the artifact: the teacher's own, unless that computes elsewhere or in another way."""
    own = parts_of(training.teacher.source.engine)
    if isinstance(own, NativeEngine):
        return own
    from runtime.checkpoint.artifact import Artifact
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.choose import choose_engine

    blueprint = Blueprint(Artifact(training.artifact), torch.device("cpu"), "auto", None, False)
    found = parts_of(choose_engine(blueprint.build(), blueprint))
    if isinstance(found, str):
        raise RequestError(f"skipped halves cannot be searched for: {found}")
    return found


def check(config: SkipConfig, target: Prospect) -> None:
    """See `DraftMethod.check`."""
    from runtime.kernels.cpu import library

    check_lengths(config, target)
    check_in_c(target, 1)
    if library.load() is None:
        raise RefusedError("method", "sets of halves are tried with the decoder in C, and there is no C compiler here")
    if config.places >= config.sequence_length:
        text = f"rows of {config.sequence_length} tokens have 1 to {config.sequence_length - 1} places, not {config.places}"
        raise RefusedError("places", text)


METHOD = DraftMethod(
    name="skip",
    config=cast("type[DraftConfig]", SkipConfig),  # nothing is trained, so it has no fields of a training
    summary="the artifact drafts for itself with some of its attention and feed-forward halves left out",
    paper="Zhang et al., Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding, 2023, arXiv 2309.08168",
    make=make,
    check=check,
    trains=False,
)
