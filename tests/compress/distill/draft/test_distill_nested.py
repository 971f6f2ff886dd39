"""Nested drafts: each depth is the draft of its first layers, and all are trained by one loss."""

from __future__ import annotations

from typing import Any

import distill_runs as runs
import pytest
import torch
from teachers import acceptance_of

from compress.distill.draft.cut import cut, final_norm
from compress.distill.draft.s2d import NestedStudent
from compress.distill.draft.student import Student
from compress.distill.train.losses import Objective
from compress.distill.train.options import TrainOptions
from runtime.errors import RequestError


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: Any = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 61, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


@pytest.mark.parametrize("make", [runs.target, gpt2])
def test_each_depth_is_a_cut_of_the_draft(make: Any) -> None:
    draft = make()
    nested = NestedStudent(draft, [1, 2, 3])
    nested.eval()
    ids = runs.rows(2).ids
    with torch.no_grad():
        found = nested.by_depth(ids, [1, 2, 3])
        for depth in (1, 2, 3):
            expected = cut(draft, range(depth))(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(found[depth], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(nested.variants()[str(depth)].logits(ids), expected, atol=1e-5, rtol=1e-5)
    assert final_norm(draft) is (draft.transformer.ln_f if make is gpt2 else draft.model.norm)


def test_the_loss_is_the_sum_over_the_depths() -> None:
    model = runs.target()
    kept = torch.arange(0, 61, 2)
    batch = runs.rows(4).batch(range(4), range(4))
    teacher = model(input_ids=batch.ids).logits.detach()
    nested = NestedStudent(model, [1, 3], Objective("js"), kept)
    total, count = nested(batch, teacher)
    expected = sum(
        float(Student(cut(model, range(depth)), Objective("js"), kept)(batch, teacher)[0].detach()) for depth in (1, 3)
    )
    assert float(total.detach()) == pytest.approx(expected, rel=1e-5)
    assert float(count) == float(batch.trained.sum())


def test_all_depths_gain_by_training() -> None:
    model = runs.target()
    nested = NestedStudent(cut(model, range(2)), [1, 2])
    options = TrainOptions(steps=60, batch=8, evaluate_every=20, learning_rate=2e-3)
    found = runs.run(nested, model, options, source=runs.rows(64, seed=3))
    for name in ("acceptance", "acceptance_depth_1", "acceptance_depth_2"):
        assert found.after[name] > found.before[name] + 0.02
    both = (found.after["acceptance_depth_1"] + found.after["acceptance_depth_2"]) / 2
    assert found.after["acceptance"] == pytest.approx(both)
    held = runs.rows(5, seed=9)
    one = acceptance_of(Student(cut(nested.draft, range(1))), model, held, length=1)["text"]
    again = acceptance_of(nested.variants()["1"], model, held, length=1)["text"]
    assert one["sampling"]["accepted"] == pytest.approx(again["sampling"]["accepted"], abs=1e-6)
    assert one["sampling"]["acceptance"] == pytest.approx(found.after["acceptance_depth_1"], abs=1e-5)


def test_heads_that_do_more_are_refused() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "num_key_value_heads": 2, "vocab_size": 31, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # fmt: skip
    torch.manual_seed(0)
    scaled = CohereForCausalLM(CohereConfig(**sizes, logit_scale=3.0))
    with torch.no_grad():
        scaled.model.embed_tokens.weight.normal_()
    with pytest.raises(RequestError, match="logits"):
        NestedStudent(scaled, [1, 2])
