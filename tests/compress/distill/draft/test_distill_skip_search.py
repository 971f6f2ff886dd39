"""The search for halves of layers to leave out: against trying all of them, and what it counts against speculative decoding itself."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import random_llama
from without_halves import without

from compress.distill.draft import skip_search
from compress.distill.draft.skip_search import METHOD, DraftTrials, SkipConfig, evenly, find_skips, measure_views
from compress.distill.draft.speedup import speedup, tokens_of
from compress.distill.draft.subset_search import Process, Search, improvement, search
from compress.run.run import apply_recipe
from runtime.engines.native.engine import NativeEngine
from runtime.engines.native.sublayers import View
from runtime.engines.native.take_over import take_over
from runtime.engines.torch.engine import TorchEngine
from runtime.kernels.cpu import library

needs_compiler = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")


# ---------------------------------------------------------------- subsets
def landscape(seed: int, members: int) -> Any:
    """Members that cost acceptance by themselves and in pairs, and save time; a draft of up to 6 tokens."""
    draw = np.random.default_rng(seed)
    loss, pairs = draw.gamma(0.5, 0.05, members), draw.gamma(0.3, 0.01, (members, members))
    saved = draw.choice([1.0, 2.0], members)

    def value(subset: Any) -> float:
        chosen = list(subset)
        rate = math.exp(-loss[chosen].sum() - pairs[np.ix_(chosen, chosen)].sum())
        cost = 0.05 + 0.95 * (1 - saved[chosen].sum() / saved.sum())
        return max(sum(rate**j for j in range(d + 1)) / (d * cost + 1) for d in range(1, 7))

    return value


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_subsets_is_found(seed: int) -> None:
    value = landscape(seed, 9)
    every = (subset for size in range(10) for subset in itertools.combinations(range(9), size))
    calls: list[Any] = []

    def counted(subset: Any) -> float:
        calls.append(subset)
        return float(value(subset))

    found = search(counted, 9, 90, seed=seed)
    assert len(calls) == len(set(calls)) <= 90
    assert found.values[found.best] == pytest.approx(max(map(value, every)), rel=1e-9)
    assert found.curve() == sorted(found.curve())
    assert found.curve()[-1] == found.values[found.best]


def test_it_learns_from_what_it_tried() -> None:
    """With as many trials better than trying at random."""
    for seed in range(4):
        value, draw = landscape(seed, 30), np.random.default_rng(seed)
        found = search(value, 30, 60, seed=seed)
        by_chance = max(value(np.flatnonzero(draw.random(30) < draw.random() ** 2)) for _ in range(60))
        assert found.values[found.best] > by_chance


def test_trials_of_a_search() -> None:
    whole = search(lambda subset: float(len(subset)), 3, 99)
    assert set(whole.values) == {each for size in range(4) for each in itertools.combinations(range(3), size)}
    assert whole.best == (0, 1, 2)
    told: list[int] = []
    first = search(lambda _: 1.0, 6, 5, starts=[[5, 1, 1], [2]], told=lambda each: told.append(len(each.values)))
    assert list(first.values)[:2] == [(1, 5), (2,)]
    assert told == [1, 2, 3, 4, 5]
    assert len(first.best) <= 1  # of equals the smallest
    again = [search(landscape(1, 12), 12, 30, seed=4).values for _ in range(2)]
    assert list(again[0].items()) == list(again[1].items())


def test_a_process_knows_what_it_was_told() -> None:
    draw = np.random.default_rng(0)
    rows = np.unique(draw.random((25, 10)) < 0.5, axis=0)
    values = rows @ draw.normal(size=10) + 3
    process = Process(rows, values)
    means, deviations = process.predict(rows)
    assert np.abs(means - values).max() < 0.02
    assert deviations.max() < 0.1
    near, far = rows[:1] ^ (np.arange(10) == 2), ~rows[:1]
    assert process.predict(near)[1][0] < process.predict(far)[1][0]
    fresh = np.unique(draw.random((200, 10)) < 0.5, axis=0)
    truth = fresh @ np.linalg.lstsq(np.c_[rows, np.ones(len(rows))], values, rcond=None)[0][:10]
    assert np.corrcoef(process.predict(fresh)[0], truth)[0, 1] > 0.8


def test_expected_improvement() -> None:
    """Against its definition, by drawing."""
    draw = np.random.default_rng(0)
    for mean, deviation, best in ((0.0, 1.0, 0.5), (2.0, 0.3, 1.0), (-1.0, 2.0, 1.0)):
        drawn = np.maximum(draw.normal(mean, deviation, 200_000) - best, 0).mean()
        found = improvement(np.array([mean]), np.array([deviation]), best)[0]
        assert abs(found - drawn) < 0.01


def test_the_best_of_equals_is_the_smallest() -> None:
    assert Search({(0, 1): 2.0, (2,): 2.0, (): 1.0}).best == (2,)


# ---------------------------------------------------------------- drafts
def engine_of(model: Any) -> NativeEngine:
    found = take_over(TorchEngine(model, torch.device("cpu")))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    """Four layers of which the first and the attention of the third say most."""
    found = random_llama(0, num_hidden_layers=4)
    for index, layer in enumerate(found.model.layers):
        layer.self_attn.o_proj.weight.data *= 1.0 if index in (0, 2) else 0.05
        layer.mlp.down_proj.weight.data *= 1.0 if index == 0 else 0.05
    return found


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randint(1, 257, (3, 70), generator=torch.Generator().manual_seed(1))


@needs_compiler
@pytest.mark.parametrize("halves", [([], []), ([1], [2, 3]), ([2], []), ([0, 1, 2, 3], [3])])
def test_drafts_are_counted_as_speculative_decoding_does(model: Any, rows: torch.Tensor, halves: Any) -> None:
    """Against transformers: what the model writes token by token, and a draft over its own cache with these halves taken out."""
    engine = engine_of(model)
    runs = DraftTrials(engine, rows, 3, 4)
    counts = runs.accepted(View(engine, range(4), *halves)).tolist()
    starts = [34, 45, 57]  # places of the last known tokens
    for place, count in enumerate(counts):
        text = rows[place // 3, : starts[place % 3] + 1].tolist()
        written = list(text)
        with torch.no_grad():
            for _ in range(4):
                written.append(int(model(torch.tensor([written]), use_cache=False).logits[0, -1].argmax()))
        assert runs.written[place].tolist() == written[len(text) :]
        part = without(copy.deepcopy(model), *halves)
        expected = 0
        for depth in range(4):
            known = written[: len(text) + depth]
            with torch.no_grad():
                cache = model(torch.tensor([text[:-1]]), use_cache=True).past_key_values
                logits = part(torch.tensor([known[len(text) - 1 :]]), past_key_values=cache).logits[0, -1]
            if int(logits.argmax()) != written[len(text) + depth]:
                break
            expected += 1
        assert count == expected
    if halves == ([], []):
        assert counts == [4] * 9
        assert runs.rates(View(engine, range(4))) == [1.0] * 4
    again = runs.accepted(View(engine, range(4), [0], [0]))  # what was drafted before leaves no trace
    assert again.tolist() == DraftTrials(engine, rows, 3, 4).accepted(View(engine, range(4), [0], [0])).tolist()


@needs_compiler
def test_the_best_halves_of_all_are_found(model: Any, rows: torch.Tensor) -> None:
    engine = engine_of(model)
    runs, whole = DraftTrials(engine, rows, 5, 4), View(engine, range(4)).weight_bytes

    def value(subset: Any) -> float:
        view = View(engine, range(4), [i for i in subset if i < 4], [i - 4 for i in subset if i >= 4])
        rates = runs.rates(view)
        return max(speedup(tokens_of(rates[:n]), n, view.weight_bytes / whole) for n in range(1, len(rates) + 1))

    every = [subset for size in range(1, 8) for subset in itertools.combinations(range(8), size)]
    best = max(map(value, every))
    assert best > 1.1
    found = find_skips(engine, rows, SkipConfig(trials=80, places=5, tokens=4))
    subset = [*found.skip_attention, *(4 + layer for layer in found.skip_mlp)]
    assert value(subset) == pytest.approx(best)
    assert found.curve[-1] == pytest.approx(max(best, 1.0))
    assert found.speedup == pytest.approx(max(best, 1.0))
    assert found.length == 0 or found.speedup > 1
    assert 2 not in found.skip_attention
    assert 0 not in found.skip_attention or 0 not in found.skip_mlp
    assert found.read == round(found.cost * whole)
    assert found.facts()["search"]["rates"] == found.rates


def test_halves_are_spread_evenly() -> None:
    assert evenly(8, 2) == [2, 6]
    assert evenly(5, 1) == [2]
    assert evenly(3, 0) == []
    for layers in range(1, 7):
        assert evenly(layers, layers) == list(range(layers))


@needs_compiler
def test_views_are_measured_on_every_kind(model: Any, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.distill.draft import skip_search as skip_measure

    monkeypatch.setattr(skip_measure, "_ROWS", 2)  # rows are read in parts, and counted together
    engine = engine_of(model)
    views = {"whole": View(engine, range(4)), "part": View(engine, range(4), [2], [1, 2])}
    found = measure_views(engine, views, {"held_out": rows, "text": rows[:1, :4]}, 3, 4)
    counts = DraftTrials(engine, rows, 3, 4).accepted(views["part"]).tolist()
    run = found["part"]["held_out"]["continuations"]["greedy"]
    for place, rate in enumerate(run["by_position"]):
        reached = [count for count in counts if count >= place]
        assert rate == (sum(count > place for count in reached) / len(reached) if reached else None)
    assert run["acceptance"] == run["by_position"][0]
    assert run["accepted"] == pytest.approx(sum(counts) / 9)
    assert (run["tokens"], run["steps"]) == (pytest.approx(run["accepted"] + 1), 9)
    assert found["whole"]["held_out"]["continuations"]["greedy"]["by_position"] == [1.0] * 4
    assert found["whole"]["text"]["continuations"]["greedy"]["steps"] == 3
    assert 0 < run["accepted"] < 4


@needs_compiler
def test_made_for_an_artifact(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: an artifact, its settings found, texts that stay what they are."""
    import compress
    import runtime
    from compress.core.progress import Reporter
    from compress.core.run_directory import RunDirectory
    from compress.distill.draft.training import DraftTraining
    from compress.distill.train.teacher import Teacher
    from compress.model.stage import Store
    from runtime.drafting.config.build import Target, build
    from runtime.drafting.config.request import parse
    from runtime.drafting.lengths.fixed import Fixed
    from runtime.drafting.speculation import Speculation

    model.save_pretrained(tmp_path / "source")
    recipe = tmp_path / "recipe.json"
    stages = [{"quantize": {"method": "rtn", "bits": 8, "group_size": 32}}]
    recipe.write_text(json.dumps({"name": "t", "model": str(tmp_path / "source"), "stages": stages}))
    artifact = Path(compress.apply(str(recipe), output=str(tmp_path / "out")).path)
    loaded = runtime.load(artifact)
    rows = torch.randint(1, 257, (4, 40), generator=torch.Generator().manual_seed(1))
    searched: list[Any] = []
    find = skip_search.find_skips
    monkeypatch.setattr(
        skip_search, "find_skips", lambda *given, **named: searched.append(given) or find(*given, **named)
    )
    with Reporter(None, quiet=True) as reporter:
        making = DraftTraining(
            artifact=artifact, teacher=Teacher.of(loaded), rows=rows, kinds={"text": rows[:2, :30]},
            store=Store(tmp_path / "draft", tmp_path / "work", RunDirectory(tmp_path), apply_recipe), reporter=reporter,
        )  # fmt: skip
        settings = METHOD.make(making, SkipConfig(trials=12, places=3, tokens=3))
    assert settings == {
        "method": "skip", "skip_attention": making.facts["skip_attention"], "skip_mlp": making.facts["skip_mlp"],
    }  # fmt: skip
    assert searched[0][0] is loaded.engine  # the target is not loaded again
    assert torch.equal(searched[0][1], rows[:3])  # the last row is held out
    search = making.facts["search"]
    assert len(search["curve"]) == 12
    engine = loaded.engine
    sets = {"before": search["evenly"], "after": making.facts}
    for when, halves in sets.items():
        assert len(halves["skip_mlp"]) == len(making.facts["skip_mlp"])
        view = View(engine, range(4), halves["skip_attention"], halves["skip_mlp"])
        for kind, texts in (("held_out", rows[3:]), ("text", rows[:2, :30])):
            run = making.facts[when][kind]["continuations"]["greedy"]
            rates = DraftTrials(engine, texts, 3, 3).rates(view)
            assert [rate for rate in run["by_position"] if rate is not None] == rates
            promise = making.facts["worth"][when][kind]["greedy"]
            assert promise["cost"] == pytest.approx(view.weight_bytes / View(engine, range(4)).weight_bytes)
            assert promise["speedup"] >= 1
    assert json.loads(json.dumps(making.facts)) == making.facts
    prompts = rows[:, :8].tolist()
    expected = loaded.generate(prompts, max_new_tokens=24)
    drafter = build(parse({**settings, "confidence": 0.0}), Target(loaded.artifact, loaded.engine))
    loaded.speculation = Speculation(drafter, lengths=Fixed(3, 3))
    assert loaded.generate(prompts, max_new_tokens=24) == expected
    assert loaded.stats["accepted_tokens"] > 0
