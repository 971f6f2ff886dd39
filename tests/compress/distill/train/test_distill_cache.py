"""The teacher's cache: what is read is what the teacher said, a kill costs a shard, and nothing else can be taken for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_llama
from safetensors import safe_open
from teachers import logits_teacher

from compress.distill.train import teacher_cache
from compress.distill.train.data import Batch, TextRows
from compress.distill.train.losses import Objective, SparseTargets
from compress.distill.train.teacher_cache import cache_teacher, likeliest_bytes
from runtime.errors import CompressError, RequestError

ROWS = TextRows(torch.randint(1, 257, (7, 10), generator=torch.Generator().manual_seed(0)))


def of(*rows: int) -> Batch:
    """A batch of some of the rows, by number."""
    index = torch.tensor(rows)
    ids = torch.zeros(len(rows), 10, dtype=torch.int64)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), index, torch.zeros_like(index))


def three_rows_a_shard(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(teacher_cache, "SHARD_BYTES", 3 * likeliest_bytes(10, k, 257))


class Counted:
    """A teacher that counts the rows it reads and can be stopped."""

    def __init__(self, fingerprint: str = "a", vocabulary: int = 257) -> None:
        self.model = random_llama(0, vocab_size=vocabulary)
        self.rows, self.limit = 0, 10**9
        self.teacher = logits_teacher(self.logits, vocabulary, fingerprint)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        if self.rows + len(ids) > self.limit:
            raise KeyboardInterrupt
        self.rows += len(ids)
        result: torch.Tensor = self.model(input_ids=ids).logits
        return result


@pytest.mark.parametrize("k", [1, 16, 257])
def test_what_is_read_is_what_the_teacher_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    three_rows_a_shard(monkeypatch, k)
    teacher = Counted().teacher
    cache = cache_teacher(teacher, ROWS, tmp_path / "c", k=k)
    got = cache.targets(of(5, 0, 6))
    whole = SparseTargets.of(teacher.logits(ROWS.ids[[5, 0, 6]]), k)
    assert torch.equal(got.ids, whole.ids)
    torch.testing.assert_close(got.log_probs, whole.log_probs, atol=8e-3, rtol=1e-3)
    torch.testing.assert_close(got.rest, whole.rest, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(got.log_probs.exp().sum(-1) + got.rest, torch.ones(3, 10), atol=1e-5, rtol=0)
    nbytes = sum(file.stat().st_size for file in cache.directory.glob("*.safetensors"))
    assert likeliest_bytes(70, k, 257) <= nbytes <= likeliest_bytes(70, k, 257) + 3 * 400


def test_temperature_and_kept_tokens(tmp_path: Path) -> None:
    teacher, kept = Counted().teacher, torch.tensor([1, 5, 9, 100, 256], dtype=torch.int32)
    cache = cache_teacher(teacher, ROWS, tmp_path / "c", k=2, temperature=2.0, kept=kept)
    got = cache.targets(of(*range(7)))
    expected = SparseTargets.of(teacher.logits(ROWS.ids)[..., kept.long()], 2, 2.0)
    assert torch.equal(got.ids, expected.ids)
    torch.testing.assert_close(got.log_probs, expected.log_probs, atol=3e-3, rtol=1e-3)


def test_a_kill_costs_a_shard_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_rows_a_shard(monkeypatch, 4)
    first, whole = Counted(), Counted()
    first.limit = 4  # the second shard of three rows is cut off
    with pytest.raises(KeyboardInterrupt):
        cache_teacher(first.teacher, ROWS, tmp_path / "c", k=4)
    again = Counted()
    told: list[tuple[int, int]] = []
    arguments: Any = {"k": 4}
    cache_teacher(again.teacher, ROWS, tmp_path / "c", told=lambda done, total: told.append((done, total)), **arguments)
    assert again.rows == 4
    assert told == [(6, 7), (7, 7)]
    cache_teacher(whole.teacher, ROWS, tmp_path / "d", **arguments)
    for file in sorted((tmp_path / "d").iterdir()):
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()
    done = Counted()
    cache_teacher(done.teacher, ROWS, tmp_path / "c", **arguments)
    assert done.rows == 0


def test_a_damaged_shard_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_rows_a_shard(monkeypatch, 4)
    cache = cache_teacher(Counted().teacher, ROWS, tmp_path / "c", k=4)
    file = tmp_path / "c" / "shard-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    again = Counted()
    cache_teacher(again.teacher, ROWS, tmp_path / "c", k=4)
    assert again.rows == 3
    assert file.read_bytes() == content
    with pytest.raises(RequestError, match="row 7 "):
        cache.targets(of(7))


@pytest.mark.parametrize("changes", [{"k": 5}, {"who": "b"}, {"rows": TextRows(ROWS.ids.flip(0))}])
def test_another_cache_is_not_taken_for_this_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    cache_teacher(Counted().teacher, ROWS, tmp_path / "c", k=4)
    again = Counted(changes.get("who", "a"))
    cache = cache_teacher(again.teacher, changes.get("rows", ROWS), tmp_path / "c", k=changes.get("k", 4))
    assert again.rows == 7
    assert cache.facts["k"] == changes.get("k", 4)
    assert cache.facts["teacher"] == changes.get("who", "a")


def test_sizes_are_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted()
    monkeypatch.setattr("compress.distill.train.teacher_cache.SPARE_BYTES", 2**62)
    with pytest.raises(CompressError, match="MB are free"):
        cache_teacher(counted.teacher, ROWS, tmp_path / "c", k=8)
    assert not (tmp_path / "c").exists()
    assert counted.rows == 0


def test_ids_of_large_vocabularies(tmp_path: Path) -> None:
    vocabulary = 2**16 + 5

    def logits(ids: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(*ids.shape, vocabulary)
        result[..., -1], result[..., 7] = 20.0, 18.0
        return result

    rows = TextRows(ROWS.ids[:2, :3])
    cache = cache_teacher(logits_teacher(logits, vocabulary), rows, tmp_path / "c", k=2)
    assert cache.targets(of(0)).ids[0, 0].tolist() == [vocabulary - 1, 7]
    small = cache_teacher(Counted().teacher, ROWS, tmp_path / "d", k=2)
    for which, dtype in ((cache, torch.int32), (small, torch.uint16)):
        with safe_open(which.directory / "shard-00000.safetensors", framework="pt") as file:
            assert file.get_tensor("ids").dtype == dtype


def test_impossible_distributions_survive_float16(tmp_path: Path) -> None:
    """Log-probabilities far below what float16 holds, and -inf."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        result = torch.full((*ids.shape, 8), -1e6)
        result[..., 0], result[..., 1] = 0.0, -torch.inf
        return result

    cache = cache_teacher(logits_teacher(logits, 8), TextRows(ROWS.ids[:2] % 8), tmp_path / "c", k=8)
    got = cache.targets(of(0, 1))
    assert bool(got.log_probs.isfinite().all())
    student = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(0))
    for kind in ("forward_kl", "reverse_kl", "js", "tvd"):
        assert bool(Objective(kind)(student, got).isfinite().all())
