"""Training: that it learns, and that accumulation, resuming and several processes change nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distill_runs as runs
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from teachers import teacher_of
from warm_python import python

from compress.core.tracking import Tracking
from compress.distill.draft.student import Student, overlaps
from compress.distill.train import checkpoint
from compress.distill.train.data import Batch, MixedRows, OnPolicyRows
from compress.distill.train.losses import Objective
from compress.distill.train.options import TrainOptions
from compress.distill.train.teacher_cache import cache_teacher
from runtime.errors import CompressError, RequestError

QUICK: dict[str, Any] = {
    "steps": 8,
    "batch": 4,
    "evaluate_every": 4,
    "patience": None,
    "learning_rate": 3e-3,
    "warmup": 0.25,
}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_draft_learns_its_target() -> None:
    model = runs.target()
    who = runs.student(model)
    before = runs.weights(who)
    options = TrainOptions(steps=60, batch=8, evaluate_every=20, learning_rate=5e-3)
    found = runs.run(who, model, options, source=runs.rows(64, seed=3))
    assert found.after["acceptance"] > found.before["acceptance"] + 0.05
    assert found.curve["train"][-1]["loss"] < 0.7 * found.curve["train"][0]["loss"]
    assert [look["step"] for look in found.curve["held_out"]] == [0, 20, 40, 60]
    assert found.curve["held_out"][0]["acceptance"] == found.before["acceptance"]
    assert max(look["acceptance"] for look in found.curve["held_out"]) == found.after["acceptance"]
    assert not equal(before, runs.weights(who))
    assert not who.training
    json.dumps(found.facts(), allow_nan=False)


def test_what_is_measured_is_the_overlap_of_the_distributions() -> None:
    model = runs.target()
    who, held = runs.student(model), runs.rows(5, seed=9)
    found = runs.run(who, model, TrainOptions(**{**QUICK, "steps": 1}))
    accepted, agreed, count = 0.0, 0, 0
    draft = runs.student(model).draft
    for row, trained in zip(held.ids, held.trained, strict=True):
        with torch.no_grad():
            p, q = (torch.softmax(m(input_ids=row[None]).logits[0], -1) for m in (model, draft))
        for place in trained.nonzero()[:, 0].tolist():
            accepted += float(torch.minimum(p[place], q[place]).sum())
            agreed += int(p[place].argmax() == q[place].argmax())
            count += 1
    assert found.before["acceptance"] == pytest.approx(accepted / count, abs=1e-6)
    assert found.before["agreement"] == agreed / count


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "js", "tvd", "cross_entropy"])
def test_the_first_gradient_is_that_of_the_mean_over_all_positions(kind: str) -> None:
    """With a rate of nearly nothing Adam's first moment holds a share of the clipped gradient."""
    model = runs.target()
    who, source = runs.student(model, Objective(kind)), runs.rows(6)
    twin = runs.student(model, Objective(kind))
    source.trained[1] = False  # a row of which nothing counts
    options = TrainOptions(steps=1, batch=6, micro_batch=2, learning_rate=1e-9, clip=1e9, evaluate_every=1)
    moments: dict[str, torch.Tensor] = {}
    save = checkpoint.optimizer_state

    def watching(*arguments: Any) -> dict[str, torch.Tensor]:
        moments.update(save(*arguments))
        return moments

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "optimizer_state", watching)
        patch.setattr(checkpoint, "save", lambda *arguments, **tensors: None)
        runs.run(who, model, options, source, directory=Path("nowhere"))
    logits = twin.draft(input_ids=source.ids).logits[source.trained]
    with torch.no_grad():
        teacher = model(input_ids=source.ids).logits[source.trained]
    labels = source.ids.roll(-1, 1)[source.trained]
    loss = Objective(kind)(logits, None if kind == "cross_entropy" else teacher, labels).mean()
    torch.autograd.backward(loss)
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        expected = parameter.grad * 0.1
        torch.testing.assert_close(moments[f"{name}|exp_avg"], expected, atol=1e-6, rtol=2e-4)


def test_micro_batches_change_nothing_but_rounding() -> None:
    model = runs.target()
    whole, parts = runs.student(model), runs.student(model)
    first = runs.run(whole, model, TrainOptions(**QUICK))
    second = runs.run(parts, model, TrainOptions(**QUICK, micro_batch=1))
    assert first.after["acceptance"] == pytest.approx(second.after["acceptance"], abs=1e-4)
    for a, b in zip(runs.weights(whole).values(), runs.weights(parts).values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_a_seed_decides_all_and_nothing_outside_is_touched() -> None:
    model = runs.target()
    found = []
    for seed in (0, 0, 1):
        who = runs.student(model)
        torch.manual_seed(len(found))  # of no importance
        state = torch.get_rng_state()
        runs.run(who, model, TrainOptions(**QUICK, seed=seed))
        assert torch.equal(state, torch.get_rng_state())
        found.append(runs.weights(who))
    assert equal(found[0], found[1])
    assert not equal(found[0], found[2])


def test_each_row_of_each_step_has_a_seed_of_its_own() -> None:
    model, given = runs.target(), runs.rows()
    seen: list[list[int]] = []
    for seed in (0, 1):
        seen.append([])

        def batch(rows: Any, seeds: Any, into: list[int] = seen[-1]) -> Batch:
            into.extend(seeds)
            return given.batch(rows, seeds)

        source = Stopping(given, 99)
        source.batch = batch  # type: ignore[method-assign]
        runs.run(runs.student(model), model, TrainOptions(**QUICK, seed=seed), source)
    assert len({*seen[0], *seen[1]}) == 2 * 8 * 4


class Killed(BaseException):
    pass


class Stopping:
    """A source that ends the process, as it were, at its n-th batch."""

    def __init__(self, source: Any, after: int) -> None:
        self.source, self.left = source, after
        self.describe = source.describe

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, *arguments: Any) -> Batch:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return self.source.batch(*arguments)  # type: ignore[no-any-return]


@pytest.mark.parametrize("data", ["given", "on_policy", "mixed"])
@pytest.mark.parametrize("after", [1, 5, 7])
def test_resuming_gives_the_same_bits(tmp_path: Path, data: str, after: int) -> None:
    model = runs.target()

    def source(who: Student) -> Any:
        fixed = runs.rows()
        own = OnPolicyRows(who.draft, fixed.ids[:, :6], 6)
        return {"given": fixed, "on_policy": own, "mixed": MixedRows(fixed, own, 0.5)}[data]

    options = TrainOptions(**{**QUICK, "evaluate_every": 3}, checkpoint_every=2)
    straight = runs.student(model)
    whole = runs.run(straight, model, options, source(straight))
    broken = runs.student(model)
    with pytest.raises(Killed):
        runs.run(broken, model, options, Stopping(source(broken), after), directory=tmp_path)
    resumed = runs.student(model)
    again = runs.run(resumed, model, options, source(resumed), directory=tmp_path)
    assert equal(runs.weights(straight), runs.weights(resumed))
    assert again.curve == whole.curve
    assert (again.best_step, again.before, again.after, again.ended) == (
        whole.best_step, whole.before, whole.after, whole.ended,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000008"]
    finished = runs.student(model)
    last = runs.run(finished, model, options, source(finished), directory=tmp_path)
    assert equal(runs.weights(straight), runs.weights(finished))
    assert last.curve == whole.curve


def test_a_checkpoint_is_of_one_run_only(tmp_path: Path) -> None:
    model = runs.target()
    options = TrainOptions(**QUICK, checkpoint_every=4)
    runs.run(runs.student(model), model, options, directory=tmp_path)
    for changed, message in (
        (
            {"options": TrainOptions(**{**QUICK, "learning_rate": 1e-3})},
            "options.learning_rate is 0.003 there, 0.001 here",
        ),
        (
            {"who": runs.student(model, Objective("tvd"))},
            "student.objective.divergence is 'forward_kl' there, 'tvd' here",
        ),
        ({"source": runs.rows(17)}, "source.rows is"),
    ):
        arguments = {"who": runs.student(model), "options": options, **changed}
        with pytest.raises(RequestError, match=message):
            runs.run(model=model, directory=tmp_path, **arguments)
    other = runs.run(runs.student(model), model, TrainOptions(**QUICK, checkpoint_every=3), directory=tmp_path)
    assert other.steps == 8
    assert not any(path.suffix in (".bin", ".pt", ".pkl") for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("damaged", [["step-000008"], ["step-000008", "step-000004"]])
@pytest.mark.parametrize("name", ["weights", "optimizer", "best", "state"])
def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: list[str], name: str
) -> None:
    """The one before is gone on from, or the beginning; the end is the same."""
    model, options = runs.target(), TrainOptions(**QUICK, checkpoint_every=4)
    first = runs.student(model)
    runs.run(first, model, options, directory=tmp_path)
    for number, step in enumerate(damaged):
        file = next((tmp_path / step).glob(f"{name}.*"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if number else content[:-3])
    again = runs.student(model)
    runs.run(again, model, options, directory=tmp_path)
    assert equal(runs.weights(first), runs.weights(again))
    assert [f"{step} is damaged" in caplog.text for step in damaged] == [True] * len(damaged)


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = runs.target()
    options = TrainOptions(**QUICK, checkpoint_every=2)
    straight = runs.student(model)
    runs.run(straight, model, options)
    write = checkpoint.write_json
    calls: list[Path] = []

    def failing(path: Path, value: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise Killed
        write(path, value)

    monkeypatch.setattr(checkpoint, "write_json", failing)
    with pytest.raises(Killed):
        runs.run(runs.student(model), model, options, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    (tmp_path / ".step-000004.tmp").mkdir()  # what a process that is killed leaves
    (tmp_path / ".step-000004.tmp" / "weights.safetensors").write_bytes(b"half")
    resumed = runs.student(model)
    runs.run(resumed, model, options, directory=tmp_path)
    assert equal(runs.weights(straight), runs.weights(resumed))


def test_the_best_weights_are_kept_and_training_stops() -> None:
    """At a rate that spoils what it touches, the untrained draft stays the best."""
    model = runs.target()
    who = Student(runs.cut(model, range(3)))  # a copy of the target: nothing can be gained
    before = runs.weights(who)
    options = TrainOptions(steps=40, batch=4, evaluate_every=1, patience=3, learning_rate=1e-2)
    found = runs.run(who, model, options, source=runs.rows(16, seed=5))
    assert found.ended == "patience"
    assert found.steps == 3
    assert found.best_step == 0
    assert equal(before, runs.weights(who))
    assert found.after == found.before


def test_a_cached_teacher_teaches_as_a_live_one(tmp_path: Path) -> None:
    model = runs.target()
    source = runs.rows()
    live, cached = runs.student(model), runs.student(model)
    found = runs.run(live, model, TrainOptions(**QUICK), source)
    cache = cache_teacher(teacher_of(model, "t"), source, tmp_path / "c", k=runs.VOCABULARY)
    again = runs.run(cached, model, TrainOptions(**QUICK), source, teacher=cache)
    assert again.after["acceptance"] == pytest.approx(found.after["acceptance"], abs=2e-3)
    assert again.curve["train"][0]["loss"] == pytest.approx(found.curve["train"][0]["loss"], rel=1e-2)


@pytest.mark.parametrize("kind", ["forward_kl", "cross_entropy"])
def test_a_trimmed_draft_learns_over_its_own_tokens(kind: str) -> None:
    model = runs.target()
    kept = torch.tensor([1, 4, 9, 16, 25, 36, 49, 60])
    who = runs.student(model, Objective(kind), kept)
    assert who.logits(runs.rows().ids).shape == (16, 12, 8)
    found = runs.run(who, model, TrainOptions(**{**QUICK, "steps": 24}), source=runs.rows(64, seed=3))
    if kind == "forward_kl":  # the text is random: whoever learns it learns nothing of the target
        assert found.after["acceptance"] > found.before["acceptance"] + 0.003
    held = runs.rows(5, seed=9)
    with torch.no_grad():
        p = torch.softmax(model(input_ids=held.ids).logits[held.trained], -1)
        q = torch.softmax(who.draft(input_ids=held.ids).logits[held.trained][:, kept], -1)
    assert found.after["acceptance"] == pytest.approx(float(torch.minimum(p[:, kept], q).sum(-1).mean()), abs=1e-5)
    assert found.after["agreement"] == pytest.approx(
        float((kept[q.argmax(-1)] == p.argmax(-1)).double().mean()), abs=1e-9
    )
    # Rows of the head that are not kept have no part in the loss.
    batch = runs.rows().batch(range(8), range(8))
    total, count = who(batch, None if kind == "cross_entropy" else model(input_ids=batch.ids).logits.detach())
    torch.autograd.backward(total)
    rows = who.draft.lm_head.weight.grad.abs().sum(1).nonzero()[:, 0]
    assert set(rows.tolist()) <= set(kept.tolist())
    following = batch.ids.roll(-1, 1)[batch.trained]
    assert float(count) == float(
        (torch.isin(following, kept) if kind == "cross_entropy" else torch.ones_like(following)).sum()
    )


def test_half_precision_is_of_the_forward_pass_only() -> None:
    model = runs.target()
    found = {}
    for precision in ("float32", "bfloat16", "auto"):
        who = runs.student(model)
        found[precision] = runs.run(who, model, TrainOptions(**QUICK, precision=precision)).curve["train"][-1]["loss"]
        assert {value.dtype for value in runs.weights(who).values()} == {torch.float32}
    assert found["auto"] == found["float32"]
    assert found["bfloat16"] != found["float32"]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)


def test_frozen_weights_stay() -> None:
    model = runs.target()
    draft = runs.cut(model, range(1)).requires_grad_(False)
    draft.model.layers.requires_grad_(True)
    who = Student(draft)
    before = runs.weights(who)
    runs.run(who, model, TrainOptions(**QUICK))
    for name, value in runs.weights(who).items():
        assert torch.equal(value, before[name]) == (".layers." not in name)


def test_overlaps_of_kept_and_whole_vocabularies_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 4, 9, generator=generator) for _ in range(2))
    counted = torch.rand(3, 4, generator=generator) > 0.3
    whole = torch.full_like(q, -torch.inf)
    kept = torch.tensor([0, 3, 8])
    whole[..., kept] = q[..., kept]
    found, expected = overlaps(q[..., kept], p, counted, kept), overlaps(whole, p, counted)
    assert found["acceptance"] == pytest.approx(expected["acceptance"])
    assert found["agreement"] == expected["agreement"]


def test_the_rate_rises_and_falls() -> None:
    options = TrainOptions(steps=100, warmup=0.1, final_rate=0.2)
    rates = [options.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(n + 1) / 11 for n in range(10)])
    assert rates[10] == 1
    assert rates[55] == pytest.approx(0.6)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert options.rate(100) == pytest.approx(0.2)
    assert TrainOptions(steps=1).rate(0) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"batch": 0}, {"micro_batch": 0}, {"learning_rate": 0.0}, {"learning_rate": math.nan}, {"warmup": 1.5},
     {"final_rate": -0.1}, {"clip": 0.0}, {"precision": "fp8"}, {"betas": (0.9, 1.0)}, {"patience": 0}, {"seed": -1}, {"steps": True}],
)  # fmt: skip
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        TrainOptions(**wrong)


def test_what_cannot_be_trained_is_refused() -> None:
    model = runs.target()
    options = TrainOptions(**QUICK)
    judge = teacher_of(model)

    def attempt(who: Student, source: Any = None, teacher: Any = judge, **changes: Any) -> None:
        arguments = {"held_out": runs.rows(5), "judge": judge, "options": options, **changes}
        runs.Training(who, source or runs.rows(), teacher, **arguments).run()

    with pytest.raises(RequestError, match="bfloat16"):
        attempt(Student(runs.cut(model, range(1)).to(torch.bfloat16)))
    with pytest.raises(RequestError, match="frozen"):
        attempt(Student(runs.cut(model, range(1)).requires_grad_(False)))
    sharded = SimpleNamespace(distributed_type=SimpleNamespace(value="FSDP"), num_processes=1)
    with pytest.raises(RequestError, match="FSDP shards them"):
        attempt(runs.student(model), accelerator=sharded)


def test_a_run_that_diverges_says_so() -> None:
    model = runs.target()
    who = runs.student(model)
    with torch.no_grad():
        who.draft.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(CompressError, match="step 1 is nan"):
        runs.run(who, model, TrainOptions(**QUICK))


def test_progress_is_told() -> None:
    lines: list[str] = []

    class Told:
        tracking = Tracking(None, "", {}, lines.append)

        def phase(self, title: str, total: int) -> None:
            lines.append(f"{title} {total}")

        def step(self, note: str) -> None:
            lines.append(note)

    model = runs.target()
    runs.run(runs.student(model), model, TrainOptions(**QUICK), progress=Told())
    assert lines[0] == "draft 2"
    assert lines[1].startswith("step 4: loss ")
    assert len(lines) == 3


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one(tmp_path: Path) -> None:
    options = {**QUICK, "micro_batch": 1, "evaluate_every": 2, "clip": 1e6}
    model = runs.target()
    alone = runs.student(model)
    found = runs.run(alone, model, TrainOptions(**options), directory=tmp_path / "alone")
    script = (
        "import json, sys; from accelerate import debug_launcher; import distill_runs\n"
        "debug_launcher(distill_runs.two_processes, (sys.argv[1], json.loads(sys.argv[2])), num_processes=2)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [python(), "-c", script, str(tmp_path), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["processes"], facts["kind"]) == (2, "MULTI_CPU")
    for a, b in zip(facts["curve"]["held_out"], found.curve["held_out"], strict=True):
        assert a == pytest.approx(b, abs=1e-4)
    for a, b in zip(facts["curve"]["train"], found.curve["train"], strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    theirs = load_file(tmp_path / "weights.safetensors")
    for name, value in runs.weights(alone).items():
        torch.testing.assert_close(theirs[name], value, atol=1e-4, rtol=1e-3)
    # AdamW hides a wrong scale of the gradients; its moments do not.
    moments = [load_file(tmp_path / who / "step-000008" / "optimizer.safetensors") for who in ("alone", "both")]
    assert moments[0].keys() == moments[1].keys()
    for name, value in moments[0].items():
        torch.testing.assert_close(moments[1][name], value, atol=1e-5, rtol=1e-2)
