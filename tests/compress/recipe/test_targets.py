"""Targets: class names, names, globs, expressions, and what `ignore` takes away."""

from __future__ import annotations

import pytest

from compress.recipe.targets import ModuleInfo, check_pattern, matches, select, unmatched_message
from runtime.errors import RequestError

MODULES = [
    *(
        ModuleInfo(f"model.layers.{layer}.{name}", "Linear", (64, 64))
        for layer in range(12)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
    ),
    ModuleInfo("model.embed_tokens", "Embedding", (100, 64)),
    ModuleInfo("lm_head", "Linear", (100, 64)),
]


def names(targets, ignore=(), default=False):
    return [module.name for module in select(MODULES, targets, ignore, default)]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("Linear", 49),
        ("Embedding", 1),
        ("lm_head", 1),
        ("model.layers.1.mlp.down_proj", 1),
        ("down_proj", 12),
        ("self_attn.q_proj", 12),
        ("proj", 0),
        ("linear", 0),
        ("model.layers.*.mlp.*", 24),
        ("*down_proj", 12),
        ("model.layers.1?.*", 8),
        ("model.layers.[01].*", 8),
        ("layers.*", 0),
        ("re:.*down_proj", 12),
        ("re:.*down_proj$", 12),
        ("re:model\\.layers\\.[0-3]\\..*", 16),
        ("re:down_proj", 0),
        ("re:lm", 1),
    ],
)
def test_patterns(pattern, count):
    assert len(names([pattern])) == count


def test_targets_add_up_in_model_order_and_ignore_takes_away():
    found = names(["lm_head", "*down_proj"], ["*.1?.*"])
    assert found == [*(f"model.layers.{n}.mlp.down_proj" for n in range(10)), "lm_head"]


def test_a_default_ignore_yields_to_a_target_that_names_it():
    assert "lm_head" not in names(["Linear"], ["lm_head"], default=True)
    assert names(["lm_head"], ["lm_head"], default=True) == ["lm_head"]
    assert names(["lm_head"], ["lm_head"]) == []


@pytest.mark.parametrize(
    ("pattern", "words"), [("re:(", "missing )"), ("re:[a", "unterminated"), ("", "empty"), ("re:", "empty")]
)
def test_bad_patterns(pattern, words):
    with pytest.raises(RequestError, match=r"regular expression|empty") as caught:
        check_pattern(pattern)
    assert words in str(caught.value)


def test_a_bad_expression_is_a_request_error_wherever_it_shows():
    with pytest.raises(RequestError, match="regular expression"):
        matches("re:(", MODULES[0])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("Linaer", "'Linaer' matches no module of the model; did you mean 'Linear'? Classes: Embedding, Linear."),
        ("down_porj", "did you mean 'down_proj'?"),
        ("model.layers.0.mlp.down_prj", "did you mean 'model.layers.0.mlp.down_proj'?"),
        ("re:^lm_haed$", "did you mean 'lm_head'?"),
        ("zzz", "'zzz' matches no module of the model. Classes: Embedding, Linear. Modules: q_proj, k_proj, gate_proj"),
    ],
)
def test_the_nearest_name_is_offered(pattern, words):
    assert words in unmatched_message([pattern], [], MODULES)


def test_a_selection_that_ignore_emptied_says_so():
    text = unmatched_message(["lm_head"], ["lm_head"], MODULES)
    assert text == "the targets lm_head match only modules that 'ignore' (lm_head) takes away"
