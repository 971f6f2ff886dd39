"""The scripts that measure speculative decoding, as far as they can be wrong without anybody noticing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from speculation_cases import Scripted, answers, model, prompts, speculation

ROOT = Path(__file__).resolve().parents[3]
CHECKPOINT = ROOT / "recipes" / "checkpoints" / "stdlib-4m"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("expand_core", "copying_core", "where", "speculative", "speculative_identity"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_large_model_with_a_small_core_computes_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    import expand_core

    shape = {"layers": 5, "hidden": 512, "intermediate": 1024, "heads": 8, "kv_heads": 2}
    expand_core.expand(CHECKPOINT, tmp_path / "large", shape)
    assert expand_core.check(CHECKPOINT, tmp_path / "large") < 0.1
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (512, 5)
    with pytest.raises(SystemExit, match="shape"):
        expand_core.expand(CHECKPOINT, tmp_path / "none", {**shape, "heads": 4})


def test_turns_give_ratios_and_compare_texts() -> None:
    import speculative

    plain, texts = model(), prompts(4, 20)
    truth = answers(plain, texts, max_new_tokens=16, ignore_eos=True)
    right = model(speculation(Scripted(truth, right=1.0)))
    options: Any = SimpleNamespace(new_tokens=16, rounds=2)
    (row,) = speculative._turns(plain, {"scripted": right}, texts, 0.0, 2, options)
    assert row["same_text"] is True
    assert len(row["speedups"]) == 2
    assert row["accepted_tokens"] > 30  # of both rounds, not of the last call alone
    right.generate = lambda ids, **more: [[7] * 16 for _ in ids]  # type: ignore[method-assign]
    (row,) = speculative._turns(plain, {"wrong": right}, texts, 0.0, 2, options)
    assert row["same_text"] is False


def test_prompts_are_of_every_kind_and_different() -> None:
    import speculative
    from transformers import AutoTokenizer

    found = speculative.prompts_of(AutoTokenizer.from_pretrained(CHECKPOINT), 4)
    assert set(found) == {kind for kinds in speculative.KINDS.values() for kind in kinds}
    for rows in found.values():
        assert len(rows) == 4
        assert len({tuple(row) for row in rows}) == 4
    for row in found["edit"] + found["edited twice"]:
        assert row[-speculative.PROMPT // 2 :] == row[: speculative.PROMPT // 2]
    for core, kinds in speculative.KINDS.items():
        assert tuple(speculative.chosen(found, SimpleNamespace(core=core, kinds=None))) == kinds
    assert set(speculative.chosen(found, SimpleNamespace(core="bundled", kinds=["edit"]))) == {"edit"}


def test_rows_that_teach_copying_say_which_tokens_are_copies() -> None:
    import copying_core

    numbers, ids = torch.Generator().manual_seed(0), torch.arange(5000, 9000)  # no token twice, none of the random ones
    shares = []
    for _ in range(200):
        row, copies = copying_core.row(ids, 4096, numbers)
        assert row.shape == copies.shape == (copying_core.WIDTH,)
        before: set[tuple[int, int]] = set()
        for first, second, copy in zip(row.tolist(), row.tolist()[1:], copies.tolist()[1:], strict=False):
            # A copied token followed the one before it already, where neither was edited.
            assert not copy or (first, second) in before or first < 4096
            before.add((first, second))
        shares.append(copies.float().mean())
    assert 0.4 < float(torch.stack(shares).mean()) < 0.9


def test_copying_is_measured_where_it_can_be_seen() -> None:
    import copying_core

    class Induction:
        """Predicts what followed the same token before; without such a token, token 0."""

        def __call__(self, input_ids: Any) -> Any:
            logits = torch.zeros(*input_ids.shape, 5000)
            for row, tokens in enumerate(input_ids.tolist()):
                for place, token in enumerate(tokens):
                    if token in tokens[:place]:
                        logits[row, place, tokens[tokens.index(token) + 1]] = 1
            return SimpleNamespace(logits=logits)

    ids = torch.randperm(4096) + 1
    assert copying_core.copied(Induction(), ids, rows=8) == 1.0
    assert (
        copying_core.copied(lambda input_ids: SimpleNamespace(logits=torch.zeros(*input_ids.shape, 5000)), ids) < 0.01
    )


def test_a_text_that_differs_is_counted(monkeypatch: Any, tmp_path: Path) -> None:
    import speculative_identity

    import runtime
    from runtime.api.model import Model

    options: Any = SimpleNamespace(threads=None, batches=[1, 4], new_tokens=6)
    rows = prompts(8, 20)
    (alone, together) = speculative_identity.compare(
        "4m", CHECKPOINT, {"lookup": "lookup"}, rows, options, dtype="float32"
    )
    assert (alone["prompts"], together["prompts"]) == (1, 8)
    assert alone["differing"] == together["differing"] == 0
    generate = Model.generate

    def wrong(self: Model, ids: Any, **more: Any) -> Any:
        found: Any = generate(self, ids, **more)
        if self.speculation is not None:
            found[0][-1] += 1
        return found

    monkeypatch.setattr(runtime.Model, "generate", wrong)
    (alone, together) = speculative_identity.compare(
        "4m", CHECKPOINT, {"lookup": "lookup"}, rows, options, dtype="float32"
    )
    assert alone["differing"] == 1
    assert together["differing"] == 2
