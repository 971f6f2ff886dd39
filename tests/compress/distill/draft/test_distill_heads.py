"""Training heads: what they say is what a draft will say, what is made small is what it should be, and a small text is learned by heart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_stages import UNTRACKED
from head_students import KINDS, head_student, write_heads
from random_models import random_llama
from safetensors.torch import load_file
from teachers import acceptance_of, features_of
from torch.nn import functional

import runtime
from compress.core.run_directory import RunDirectory
from compress.distill.draft import medusa, mtp
from compress.distill.draft.features import Features
from compress.distill.draft.heads import HeadStudent, rank_rates
from compress.distill.draft.mtp import MTPStudent, attended
from compress.distill.draft.training import DraftTraining
from compress.distill.train.data import TextRows
from compress.distill.train.loop import Training
from compress.distill.train.losses import SparseTargets
from compress.distill.train.options import TrainOptions
from compress.distill.train.teacher import Teacher, teacher_rows
from compress.distill.train.teacher_cache import cache_teacher
from compress.model.stage import Store
from compress.run.run import apply_recipe
from runtime.api.model import Model
from runtime.config.settings import read_settings
from runtime.drafting.drafters.medusa import Medusa
from runtime.drafting.drafters.mtp import MTP
from runtime.drafting.lengths.fixed import Fixed
from runtime.drafting.speculation import Speculation
from runtime.errors import RequestError


def builder(cls: Any) -> Any:
    """Builds the drafter of a directory from settings as they are written."""
    return lambda target, path, facts, settings: cls.build(target, path, facts, **read_settings(cls, settings))


BUILDERS: dict[str, Any] = {"medusa": builder(Medusa), "mtp": builder(MTP)}
IDS = torch.randint(1, 257, (3, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def target() -> Any:
    return random_llama(0)


@pytest.fixture(scope="module")
def features(target: Any) -> Features:
    return features_of(target)


def write_directory(path: Path, student: HeadStudent, method: str, **content: Any) -> Path:
    """The directory of heads."""
    fingerprint = student.features.teacher.fingerprint
    write_heads(path, student, {"method": method, "target": fingerprint, "facts": {}, **content})
    return path


def rough(student: HeadStudent) -> HeadStudent:
    """Heads that are not at their beginning."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return student


# ---------------------------------------------------------------- the target's states
def test_states_are_what_the_head_reads(target: Any, features: Features) -> None:
    with torch.no_grad():
        output = target.model(input_ids=IDS)
        torch.testing.assert_close(features.hidden(IDS), output.last_hidden_state)
        torch.testing.assert_close(features.logits(IDS), target(input_ids=IDS).logits, atol=1e-4, rtol=1e-4)
    assert features.teacher.vocabulary == 257


def test_rows_are_read_once_as_long_as_there_is_room(target: Any) -> None:
    calls = []
    own = features_of(target, keep_bytes=2 * 14 * 64 * 4)
    inner = own._states
    own._states = lambda ids: calls.append(len(ids)) or inner(ids)  # type: ignore[func-returns-value]
    whole = own.hidden(IDS)
    assert torch.equal(own.hidden(IDS[1:]), whole[1:])
    assert calls == [3]
    assert torch.equal(own.hidden(IDS[[0, 0, 1]]), whole[[0, 0, 1]])
    assert calls == [3, 2]
    nothing = features_of(target, keep_bytes=0)
    assert torch.equal(nothing.hidden(IDS), whole)
    assert not nothing._kept


def test_an_artifacts_states_are_those_of_its_engine(tiny_artifact: Path) -> None:
    loaded = runtime.load(tiny_artifact)
    own = features_of(loaded)
    ids = torch.randint(1, 256, (5, 120), generator=torch.Generator().manual_seed(2))
    states = own.hidden(ids)
    assert states.shape == (5, 120, 64)
    torch.testing.assert_close(own.logits(ids), loaded.logits(ids), atol=0.03, rtol=0.03)
    if not hasattr(loaded.engine, "most_rows"):
        return
    module = features_of(loaded.engine.module, keep_bytes=0)
    assert float((module.hidden(ids) - states).norm() / states.norm()) < 0.02
    before = loaded.engine.most_rows
    try:
        for rows in (7, 64, 130):  # rows in several steps, and several rows in one
            loaded.engine.most_rows = rows
            assert torch.equal(features_of(loaded).hidden(ids), states)
    finally:
        loaded.engine.most_rows = before


def test_targets_that_do_more_to_their_logits_are_refused(target: Any) -> None:
    class Scaled(type(target)):  # type: ignore[misc]
        def forward(self, **arguments: Any) -> Any:
            output = super().forward(**arguments)
            output.logits = output.logits / 2
            return output

    scaled = random_llama(0)
    scaled.__class__ = Scaled
    with pytest.raises(RequestError, match="logits"):
        features_of(scaled)


# ---------------------------------------------------------------- what is proposed
def test_medusa_heads_begin_as_the_targets_own(target: Any, features: Features) -> None:
    student = head_student("medusa", features, 4)
    with torch.no_grad():
        logits = target(input_ids=IDS).logits
        for ahead, proposed in enumerate(student.proposals(IDS, 4)):
            assert proposed.shape == (3, 14 - ahead, 257)
            assert not proposed[:, 0].any()
            torch.testing.assert_close(proposed[:, 1:], logits[:, : 13 - ahead], atol=1e-4, rtol=1e-4)


def test_a_head_is_its_formula(features: Features) -> None:
    student = rough(head_student("medusa", features, 2, blocks=2))
    module: Any = student.draft.module
    with torch.no_grad():
        proposed = list(student.proposals(IDS, 2))
        for ahead, head in enumerate(module.heads):
            x = features.hidden(IDS)[:, : 13 - ahead]
            for block in head.blocks:
                y = x @ block.weight.T + block.bias
                x = x + y * torch.sigmoid(y)
            expected = x @ head.out.weight.T @ features.parts.rows()[0].T
            torch.testing.assert_close(proposed[ahead][:, 1:], expected, atol=1e-4, rtol=1e-4)


def recursion(student: MTPStudent, ids: torch.Tensor, anchor: int, length: int) -> torch.Tensor:
    """Logits of the tokens drafted at an anchor of one row, one entry after another: `[length, vocab]`."""
    block: Any = student.draft.module
    states = list(student.features.hidden(ids[None])[0, :anchor])
    found = []
    for ahead in range(length):
        x = block.mixed(torch.stack(states), student.features.parts.embed(ids[1 : anchor + ahead + 1]))
        places = torch.arange(len(x))
        keys, values = block.keys_values(x, block.turns(places))
        heads, scores = block.queries(x, block.turns(places))[-1], []
        for head in range(heads.shape[0]):
            weights = torch.softmax(heads[head] @ keys[-student.window :, head].T, -1)
            scores.append(weights @ values[-student.window :, head])
        states.append(block.finish(x[-1], torch.stack(scores)))
        found.append(student.said(states[-1]))
    return torch.stack(found)


@pytest.mark.parametrize("window", [1, 2, 5, 100])
def test_all_anchors_together_are_each_by_itself(features: Features, window: int) -> None:
    student = rough(head_student("mtp", features, 4, intermediate=48))
    student.window = window
    assert isinstance(student, MTPStudent)
    with torch.no_grad():
        proposed = list(student.proposals(IDS, 4))
        for row, anchor in ((0, 1), (1, 4), (2, 9)):
            expected = recursion(student, IDS[row], anchor, 4)
            for ahead in range(4):
                torch.testing.assert_close(proposed[ahead][row, anchor], expected[ahead], atol=1e-4, rtol=1e-4)


def test_attention_sees_its_own_entries_and_no_others() -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 1, 6, 2, 4, generator=draw)
    queries = torch.randn(1, 4, 2, 3, 4, generator=draw)
    before = attended(queries, list(keys), list(values), 100)
    keys[1:, :, 3], values[1:, :, 3] = 9.0, 9.0  # another anchor's own
    keys[0, :, 3:], values[0, :, 3:] = 7.0, 7.0  # what comes after
    after = attended(queries, list(keys), list(values), 100)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3], after[:, 3])


# ---------------------------------------------------------------- what is learned
@pytest.mark.parametrize("kept", [None, torch.arange(0, 257, 2, dtype=torch.int32)])
@pytest.mark.parametrize("divergence", ["cross_entropy", "forward_kl"])
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_the_weighted_sum_over_tokens_ahead(
    features: Features, name: str, divergence: Any, kept: Any
) -> None:
    student = rough(head_student(name, features, 3, kept, divergence=divergence, decay=0.5))
    mask = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(5)) < 0.7
    rows = TextRows(IDS, mask)
    batch = rows.batch([0, 1, 2], [0] * 3)
    teacher = features.logits(IDS)
    with torch.no_grad():
        proposed = list(student.proposals(IDS, 3))
    columns = torch.arange(257) if kept is None else kept.long()
    total = weights = 0.0
    for ahead, logits in enumerate(proposed):
        for row in range(3):
            for anchor in range(1, 14 - ahead):
                place = anchor + ahead
                if not rows.trained[row, place]:
                    continue
                log_q = torch.log_softmax(logits[row, anchor], -1)
                following = int(IDS[row, place + 1]) if place + 1 < 14 else -1
                if divergence == "forward_kl":
                    log_p = torch.log_softmax(teacher[row, place, columns], -1)
                    total += 0.5**ahead * float((log_p.exp() * (log_p - log_q)).sum())
                elif following in columns.tolist():
                    total -= 0.5**ahead * float(log_q[columns.tolist().index(following)])
                else:
                    continue
                weights += 0.5**ahead
    loss, weight = student(batch, None if divergence == "cross_entropy" else teacher)
    assert float(weight) == pytest.approx(weights)
    assert float(loss.detach()) == pytest.approx(total, rel=1e-4)
    loss.backward()
    gradients = [parameter.grad for parameter in student.parameters() if parameter.requires_grad]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)


def test_sparse_targets_of_all_tokens_are_the_whole(features: Features) -> None:
    student = rough(head_student("medusa", features, 2))
    batch = TextRows(IDS).batch([0, 1, 2], [0] * 3)
    teacher = features.logits(IDS)
    with torch.no_grad():
        whole, sparse = student(batch, teacher)[0], student(batch, SparseTargets.of(teacher, 257))[0]
    assert float(whole) == pytest.approx(float(sparse), rel=1e-4)


def test_measures_are_of_the_tokens_that_count(features: Features) -> None:
    student = rough(head_student("mtp", features, 2))
    mask = torch.zeros_like(IDS, dtype=torch.bool)
    mask[1, 5:9] = True
    mask[0, :2] = True
    rows = TextRows(IDS, mask)
    teacher = features.logits(IDS)
    found = student.measure(rows.batch([0, 1, 2], [0] * 3), teacher)
    with torch.no_grad():
        proposed = list(student.proposals(IDS, 2))
    for ahead in (0, 1):
        accepted, places = 0.0, [(1, place) for place in range(5, 9)] + ([(0, 1)] if ahead == 0 else [])
        for row, place in places:
            p, q = torch.softmax(teacher[row, place], -1), torch.softmax(proposed[ahead][row, place - ahead], -1)
            accepted += float(torch.minimum(p, q).sum())
        value, count = found[f"acceptance_{ahead + 1}"]
        assert (value, count) == (pytest.approx(accepted, rel=1e-4), len(places))
    assert found["acceptance"][1] == 9


def test_rates_are_counted_where_the_tokens_before_were_guessed(features: Features) -> None:
    student = rough(head_student("medusa", features, 3))
    mask = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(6)) < 0.8
    rows, width = TextRows(IDS, mask), 150
    proposed = [logits.topk(width, -1).indices.tolist() for logits in student.proposals(IDS, 3)]
    right, seen = [[0] * width for _ in range(3)], [0] * 3
    for row in range(3):
        for anchor in range(1, 11):
            if not all(bool(rows.trained[row, anchor + ahead]) for ahead in range(3)):
                continue
            for ahead in range(3):
                seen[ahead] += 1
                guesses = proposed[ahead][row][anchor]
                token = int(IDS[row, anchor + ahead + 1])
                if token not in guesses:
                    break
                right[ahead][guesses.index(token)] += 1
    expected = [[each / max(1, count) for each in ranks] for ranks, count in zip(right, seen, strict=True)]
    assert sum(map(sum, right)) > 5
    for found, wanted in zip(rank_rates(student, rows, width), expected, strict=True):
        assert found == pytest.approx(wanted)


# ---------------------------------------------------------------- all of it
@pytest.fixture(scope="module")
def small_text(tiny_artifact: Path) -> Any:
    """An artifact, its features, and what it writes greedily."""
    loaded = runtime.load(tiny_artifact, verify=False)
    own = features_of(loaded)
    prompts = torch.randint(1, 256, (12, 4), generator=torch.Generator().manual_seed(3))
    return loaded, own, teacher_rows(own.teacher, prompts, 28, temperature=0.0)


@pytest.mark.parametrize("name", KINDS)
def test_a_small_text_is_learned_and_written_faster(small_text: Any, tmp_path: Path, name: str) -> None:
    loaded, own, rows = small_text
    student = head_student(name, own, 3, divergence="cross_entropy")
    untrained = rank_rates(student, rows, 4)
    batch = rows.batch(range(len(rows)), [0] * len(rows))
    optimizer = torch.optim.Adam([each for each in student.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(60):
        loss, weight = student(batch, None)
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()
    rates = rank_rates(student, rows, 4)
    assert untrained[0][0] < 0.3
    assert all(ranks[0] > 0.9 for ranks in rates)
    measured = acceptance_of(student, own.teacher, rows, length=3)
    assert measured["continuations"]["greedy"]["accepted"] > 2.4
    path = write_directory(tmp_path / name, student, name, rates=rates, facts={"after": measured})
    facts = json.loads((path / "draft.json").read_text())
    assert facts["target"] == loaded.artifact.checkpoint.fingerprint()
    assert facts["facts"]["after"] == measured
    assert facts["rates"] == rates
    drafter = BUILDERS[name](SimpleNamespace(artifact=loaded.artifact, engine=loaded.engine), path, facts, {})
    speculation = Speculation(drafter, lengths=Fixed(depth=3, nodes=6))
    drafting = Model(loaded.engine, loaded.tokenizer, loaded.artifact, loaded.eos_token_ids, speculation)
    texts = [row[:4].tolist() for row in rows.ids]
    written = drafting.generate(texts, max_new_tokens=28, ignore_eos=True)
    assert written == loaded.generate(texts, max_new_tokens=28, ignore_eos=True)
    assert drafting.stats["mean_accepted"] > 2.2
    assert drafting.stats["steps"] < loaded.stats["steps"] / 2


@pytest.mark.parametrize("name", KINDS)
def test_training_through_the_loop_helps_and_goes_on(small_text: Any, tmp_path: Path, name: str) -> None:
    _, own, rows = small_text

    def run(steps: int, directory: Path) -> Any:
        torch.manual_seed(0)
        student = head_student(name, own, 2)
        options = TrainOptions(
            steps=8, batch=4, learning_rate=1e-2, evaluate_every=4, checkpoint_every=4, patience=None
        )
        if steps < 8:
            inner, student.forward, done = student.forward, None, [0]  # type: ignore[assignment, method-assign]

            def stopping(batch: Any, targets: Any) -> Any:
                done[0] += 1
                if done[0] > steps:
                    raise KeyboardInterrupt
                return inner(batch, targets)

            student.forward = stopping  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                Training(student, rows, own.teacher, rows, own.teacher, options, directory=directory).run()
            return None
        training = Training(student, rows, own.teacher, rows, own.teacher, options, directory=directory)
        return training.run(), {key: value.clone() for key, value in student.state_dict().items()}

    whole, weights = run(8, tmp_path / "whole")
    assert whole.after["acceptance"] > whole.before["acceptance"]
    assert {"acceptance_1", "acceptance_2"} <= set(whole.after)
    run(6, tmp_path / "cut")
    again, same = run(8, tmp_path / "cut")
    assert again.after == whole.after
    assert all(torch.equal(value, same[key]) for key, value in weights.items())


@pytest.mark.parametrize("method", [medusa.METHOD, mtp.METHOD], ids=lambda method: method.name)
def test_a_recipes_draft_stage_makes_heads(tiny_artifact: Path, tmp_path: Path, method: Any) -> None:
    loaded = runtime.load(tiny_artifact, verify=False)
    told: list[str] = []
    making = DraftTraining(
        artifact=tiny_artifact, teacher=Teacher.of(loaded),
        rows=torch.randint(1, 256, (12, 24), generator=torch.Generator().manual_seed(4)), kinds={"text": IDS},
        store=Store(tmp_path / "draft", tmp_path / "work", RunDirectory(tmp_path), apply_recipe),
        reporter=SimpleNamespace(phase=lambda *_: None, step=told.append, tracking=UNTRACKED),
    )  # fmt: skip
    config = method.config(steps=6, batch_size=4, evaluate_every=3, tokens=2, vocabulary=200, learning_rate=1e-2)
    assert method.make(making, config) == {"model": "draft"}
    facts = json.loads((tmp_path / "draft" / "draft.json").read_text())
    assert facts["facts"] == json.loads(json.dumps(making.facts))
    for when in ("before", "after"):
        assert set(facts["facts"][when]) == {"held_out", "text"}
    assert facts["facts"]["training"]["steps"] == 6
    assert 0 < facts["facts"]["cost"]["of_target"] < 2
    assert [len(ranks) for ranks in facts["rates"]] == [8, 8]
    assert told
    drafter = BUILDERS[method.name](
        SimpleNamespace(artifact=loaded.artifact, engine=loaded.engine), tmp_path / "draft", facts, {}
    )
    drafting = Model(
        loaded.engine, None, loaded.artifact, frozenset(), Speculation(drafter, lengths=Fixed(depth=2, nodes=4))
    )
    assert drafting.generate([1, 2, 3], max_new_tokens=9) == loaded.generate(
        [1, 2, 3], max_new_tokens=9, ignore_eos=True
    )
    with pytest.raises(ValueError, match="quantize"):
        method.config(quantize="W8A16")


def test_a_teachers_cache_teaches_heads_too(small_text: Any, tmp_path: Path) -> None:
    _, own, rows = small_text
    kept = torch.arange(0, 257, 2, dtype=torch.int32)
    student = head_student("mtp", own, 2, kept=kept, intermediate=32)
    cache = cache_teacher(own.teacher, rows, tmp_path / "teacher", k=16, kept=kept)
    options = TrainOptions(steps=6, batch=4, learning_rate=1e-2, evaluate_every=6)
    trained = Training(student, rows, cache, rows, own.teacher, options).run()
    assert math.isfinite(trained.curve["train"][-1]["loss"])
    assert trained.after["acceptance"] > trained.before["acceptance"]


def test_rotations_stay_whole_and_weights_are_stored_as_asked(small_text: Any, tmp_path: Path) -> None:
    _, own, _ = small_text
    student = head_student("mtp", own, 2, kept=torch.tensor([1, 5, 9], dtype=torch.int32))
    path = write_directory(tmp_path / "mtp", student, "mtp", rates=[[0.1], [0.1]])
    stored = load_file(path / "heads.safetensors")
    assert stored["frequencies"].dtype == torch.float32
    assert torch.equal(stored["frequencies"], own.module.model.rotary_emb.inv_freq)
    assert stored["mix.weight"].dtype == torch.bfloat16
    assert stored["kept_tokens"].tolist() == [1, 5, 9]
    facts = json.loads((path / "draft.json").read_text())
    assert facts["heads"]["intermediate"] == 128
    assert facts["files"]["heads.safetensors"]["bytes"] == (path / "heads.safetensors").stat().st_size
    again = write_directory(path, student, "mtp", rates=[[0.2], [0.1]])  # replaces it
    assert json.loads((again / "draft.json").read_text())["rates"] == [[0.2], [0.1]]
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("x")
    with pytest.raises(RequestError, match="not empty"):
        write_directory(other, student, "mtp", rates=[])


def test_requests_that_cannot_be_are_refused(features: Features, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fingerprint"):
        write_directory(tmp_path / "x", head_student("medusa", features, 1), "medusa", target="", rates=[[0.1]])


def test_linear_is_what_is_said(features: Features) -> None:
    student = head_student("medusa", features, 1, kept=torch.tensor([2, 4, 6], dtype=torch.int32))
    x = torch.randn(5, 64)
    torch.testing.assert_close(student.said(x), functional.linear(x, features.parts.rows()[0])[:, [2, 4, 6]])
    assert student.width == 3
