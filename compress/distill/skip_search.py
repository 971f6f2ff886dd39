"""Draft & Verify: which attention and feed-forward halves the artifact can leave out when it drafts for itself, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field

from compress.distill.checks import check_in_c, check_lengths
from compress.distill.config import DraftConfig, DraftMethod
from compress.distill.prospect import Prospect, RefusedError
from compress.distill.skip_measure import evenly, measure_views
from compress.distill.skip_trials import DraftTrials
from compress.distill.speedup import VerifyCost, best_length, tokens_of
from compress.distill.speedup import speedup as speedup_of
from compress.distill.subset_search import Search, Subset, search
from compress.distill.worth import worth
from runtime.engines.llama import LlamaEngine
from runtime.engines.llama_view import View, parts_of
from runtime.errors import RequestError

if TYPE_CHECKING:
    from compress.distill.making import Making

Told = Callable[[int, int], Any]  # trials done, trials in all
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
    engine: Any,
    ids: torch.Tensor,
    *,
    trials: int = 200,
    places: int = 8,
    tokens: int = 8,
    verify_cost: VerifyCost = 1.0,
    seed: int = 0,
    told: Told | None = None,
) -> Found:
    """Search for the halves of layers to leave out: those whose absence makes drafting fastest.

    The value of a set is the speedup of the best draft length (`compress.distill.speedup.best_length`) at the acceptance that is measured
    with it, a drafted token costing the bytes of weights that are left: Draft & Verify (arXiv 2309.08168) with bytes for seconds, so that
    the same texts give the same set on every machine.

    Args:
        engine: the decoder in C of the model, all of it in memory.
        ids: int64 `[n, s]`, texts; see `DraftTrials`.
        trials: sets to try.
        verify_cost: of the target's step over several tokens (`compress.distill.speedup`).
        told: is called with trials done and trials in all.

    Raises:
        RequestError: an engine that does not compute with parts of a model.
    """
    lean = parts_of(engine)
    if isinstance(lean, str):
        raise RequestError(f"skipped halves cannot be searched for: {lean}")
    layers = len(lean.parts.blocks)
    runs = DraftTrials(lean, ids, places, tokens)
    whole = View(lean, range(layers)).weight_bytes

    def halves(subset: Subset) -> tuple[list[int], list[int]]:
        """Layers without attention, and without feed-forward half."""
        return [each for each in subset if each < layers], [each - layers for each in subset if each >= layers]

    def measured(subset: Subset) -> tuple[list[float], float]:
        attention, mlp = halves(subset)
        view = View(lean, range(layers), attention, mlp)
        return runs.rates(view), view.weight_bytes / whole

    def value(subset: Subset) -> float:
        if not subset:  # a draft as dear as what it is for
            return 1.0
        rates, cost = measured(subset)
        # Not `best_length`, to which all that does not pay is alike: the way to what does leads through it.
        return max(
            speedup_of(tokens_of(rates[:length]), length, cost, verify_cost) for length in range(1, len(rates) + 1)
        )

    def tell(found: Search) -> None:
        if told is not None:
            told(len(found.values), trials)

    found = search(value, 2 * layers, trials, starts=_starts(layers), seed=seed, told=tell)
    drafts = {subset: value for subset, value in found.values.items() if 0 < len(subset) < 2 * layers}
    if not drafts:
        raise RequestError(f"{trials} trials found no halves to leave out; allow more")
    best = Search(drafts).best
    rates, cost = measured(best)
    length, speedup = best_length(rates, cost, verify_cost)
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


def make(making: Making, config: SkipConfig) -> dict[str, Any]:
    """See `DraftMethod.make`."""
    engine, count = _engine(making), max(1, len(making.rows) // _HELD_OUT)

    def verify_cost(tokens: int) -> float:
        return 1 + config.row_cost * (tokens - 1)

    making.reporter.phase("skips", config.trials)
    found = find_skips(
        engine, making.rows[:-count], trials=config.trials, places=config.places, tokens=config.tokens, verify_cost=verify_cost,
        seed=config.seed, told=lambda done, every: making.reporter.step(f"{done} of {every} sets"),
    )  # fmt: skip
    making.facts |= found.facts()
    lean = cast("LlamaEngine", engine)  # the search has made sure
    layers = range(len(lean.parts.blocks))
    even = [evenly(len(layers), len(skipped)) for skipped in (found.skip_attention, found.skip_mlp)]
    views = {
        "before": View(lean, layers, *even),
        "after": View(lean, layers, found.skip_attention, found.skip_mlp),
    }
    rows = {"held_out": making.rows[-count:], **making.kinds}
    whole, making.facts["worth"] = View(lean, layers).weight_bytes, {}
    making.facts["search"] |= {"evenly": {"skip_attention": even[0], "skip_mlp": even[1]}}
    for when, measured in measure_views(lean, views, rows, config.places, config.tokens).items():
        making.facts[when] = measured
        making.facts["worth"][when] = worth(measured, views[when].weight_bytes / whole, verify_cost=verify_cost)
    return {"method": "skip", "skip_attention": found.skip_attention, "skip_mlp": found.skip_mlp}


def _engine(making: Making) -> Any:
    """The decoder in C of the artifact: the teacher's own, unless that computes elsewhere or in another way."""
    own = getattr(making.teacher.source, "engine", None)
    if isinstance(parts_of(own), LlamaEngine):
        return own
    from runtime.artifact import Artifact
    from runtime.engines.choose import lean
    from runtime.engines.torch import Blueprint

    blueprint = Blueprint(Artifact(making.artifact), torch.device("cpu"), "auto", None, False)
    return lean(blueprint.build(), blueprint)


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
