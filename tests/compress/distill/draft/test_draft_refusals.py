"""Drafts that cannot be made are refused before a model is compressed for them, with the key that says so."""

from __future__ import annotations

import pytest
from draft_stages import RTN, draft
from transformers import AutoConfig

import compress
from compress.distill.draft.checks import plain_head
from runtime.errors import RequestError
from runtime.modeling.skeleton import build_skeleton


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (draft(layers=[2, 0]), r"draft.layers: .* \[2, 0\]"),
        (draft(layers=[1, 1]), r"draft.layers: .* \[1, 1\]"),
        (draft(layers=[]), r"draft.layers: .* \[\]"),
        (draft(data=None, teacher_top=8), "draft.teacher_top: .* those of data mixed are written anew"),
        (draft(data="on_policy", teacher_top=8), "draft.teacher_top: .* those of data on_policy"),
        (draft("pard", teacher_top=8), "draft.teacher_top: cross_entropy asks no teacher"),
        (draft(divergence="cross_entropy", temperature=2.0), "draft.temperature: .* its temperature is 1, not 2"),
        (draft(continuations=2), "draft.continuations: nothing is written with data given"),
        (draft(vocabulary=1), "draft.vocabulary: 2 tokens end the model's texts, .*; 1 are too few"),
        (draft("medusa", vocabulary=1), "draft.vocabulary: 2 tokens end the model's texts"),
        (draft("s2d", depths=[2]), r"draft.depths: 1 to 1, the draft's own layers, not \[2\]"),
        (draft("pard", mask_token=257), "draft.mask_token: ids are below 257, not 257"),
        (
            draft("pard", tokens=31),
            "draft.sequence_length: rows of 32 tokens are too short for 31 at once; .* least 33",
        ),
        (draft("medusa", tokens=15, sequence_length=16), "draft.sequence_length: rows of 16 tokens are too short"),
        (draft("skip", sequence_length=16, places=16), "draft.places: rows of 16 tokens have 1 to 15 places, not 16"),
        (draft("skip", sequence_length=256), "draft.sequence_length: rows of 256 tokens are more than the 128"),
    ],
)
def test_settings_that_do_not_go_together(make_checkpoint, recipe, stage, said):
    model = make_checkpoint(eos_token_id=[255, 256])
    with pytest.raises(RequestError, match=f"stages.1.{said}"):
        compress.plan(recipe(model, RTN, stage))


@pytest.mark.parametrize(
    ("family", "stage", "said"),
    [
        ("gemma2", draft("medusa"), "a Gemma2ForCausalLM does more to its logits than its head"),
        ("gemma2", draft("mtp"), "a Gemma2ForCausalLM does more to its logits than its head"),
        ("gemma2", draft("s2d"), "does more to its logits than norm and head; it cannot be nested"),
        ("gemma2", draft("pard"), "a parallel draft needs full attention in all its layers"),
        (
            "opt",
            draft("kangaroo", exit_layer=1),
            "only the decoder in C .*: OPTForCausalLM is not computed as a Llama is",
        ),
        ("opt", draft("skip", sequence_length=32), "only the decoder in C"),
    ],
)
def test_methods_that_do_not_fit_the_model(make_checkpoint, recipe, family, stage, said):
    with pytest.raises(RequestError, match=f"stages.1.draft.method: .*{said}"):
        compress.plan(recipe(make_checkpoint(family), RTN, stage))


def test_parts_of_a_model_that_is_not_compressed_draft_too(make_checkpoint, recipe):
    assert compress.plan(recipe(make_checkpoint(), draft("skip", sequence_length=32))).stages


def test_sets_of_halves_are_tried_with_a_compiler_only(make_checkpoint, recipe, monkeypatch):
    from runtime.kernels.cpu import library

    monkeypatch.setattr(library, "load", lambda: None)
    with pytest.raises(RequestError, match=r"draft.method: .*C compiler"):
        compress.plan(recipe(make_checkpoint(), RTN, draft("skip", sequence_length=32)))


def test_too_little_text_is_found_at_once_and_a_little_less_is_said(make_checkpoint, recipe, tmp_path):
    model, text = make_checkpoint(), tmp_path / "short.txt"
    text.write_text("a line of thirty characters.\n" * 4)
    stages = recipe(model, RTN, draft(sequence_length=100), calibration={"data": str(text)})
    with pytest.raises(RequestError, match=r"the draft stage needs two rows of 100 tokens, .* and the text has one"):
        compress.plan(stages)
    found = compress.plan(recipe(model, RTN, draft(), calibration={"data": str(text)})).warnings
    assert "recipe: stages.1.draft.samples: the text has only 3 rows of 32 tokens; 16 were asked for" in found


@pytest.mark.parametrize(
    ("family", "changes", "plain"),
    [
        ("llama", {}, True),
        ("gpt2", {}, True),
        ("mixtral", {}, True),
        ("opt", {}, True),
        ("gemma2", {}, False),
        ("gemma2", {"final_logit_softcapping": None}, True),
        ("cohere", {"eos_token_id": 1}, False),
        ("granite", {"logits_scaling": 8.0}, False),
    ],
)
def test_what_comes_after_the_head_is_told_from_the_config(family, changes, plain):
    import torch

    config = AutoConfig.for_model(family, vocab_size=257, num_hidden_layers=2, **changes)
    assert plain_head(build_skeleton(config, torch.float32)) is plain


def test_a_launcher_s_processes_share_no_draft_stage(make_checkpoint, recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match=r"stages.1.draft: .*`compress draft`"):
        compress.plan(recipe(make_checkpoint(), RTN, draft()))
