"""Model cards: metadata that the hub reads, what they inherit, nothing of this machine, and what happens to edited ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import compress
from compress.cli import main
from compress.report.card import card, describe_source, write_card
from compress.report.facts import Facts, gather

RTN = {"quantize": {"method": "rtn", "bits": 4, "group_size": 32}}
THEIRS = (
    "---\nlicense: gemma\nlanguage: [en, de]\ntags: [theirs]\nbase_model: some/other\n---\n# Theirs\nTheir words.\n"
)


@pytest.fixture
def facts(tiny_artifact: Path) -> Facts:
    found = gather(tiny_artifact)
    found.manifest = json.loads(json.dumps(found.manifest))
    return found


def test_the_card_of_an_artifact(make_checkpoint: Callable[..., Path], recipe: Any, text: Path, tmp_path: Path) -> None:
    path = make_checkpoint(name="my-model")
    (path / "README.md").write_text(THEIRS)
    asked = recipe(path, RTN, evaluate={"data": str(text), "sequence_length": 32, "samples": 4})
    made = [compress.apply(asked, output=tmp_path / name, quiet=True) for name in ("one", "two")]
    (written, again) = (artifact.path.joinpath("README.md").read_text() for artifact in made)
    assert written == again, "equal runs, equal bytes"
    found = ModelCard(written)
    assert found.data.license == "gemma"
    assert found.data.language == ["en", "de"]
    assert found.data.base_model is None, "a directory is none on the hub"
    assert found.data.pipeline_tag == "text-generation"
    assert "theirs" not in found.data.tags
    measured = {result.metric_type: result.metric_value for result in found.data.eval_results}
    assert measured["perplexity"] == pytest.approx(made[0].metrics["after"]["perplexity"], abs=1e-5)
    assert measured["kl_divergence"] == pytest.approx(made[0].metrics["kl"], abs=1e-5)
    assert "Their words" not in written
    assert "model: my-model" in found.text
    assert str(tmp_path) not in written, "nothing of this machine"
    assert 'runtime.load("PATH")' in found.text
    assert "README.md" not in made[0].manifest["files"]
    # People edit cards.
    (made[0].path / "README.md").write_text(written.replace("# test", "# My model"))
    assert main(["inspect", str(made[0].path), "--verify"]) == 0
    assert write_card(made[0].path) is None
    (made[0].path / "README.md").unlink()
    assert write_card(made[0].path) == made[0].path / "README.md"
    assert made[0].path.joinpath("README.md").read_text() == written


def test_what_other_engines_read_is_told(facts: Facts) -> None:
    facts.manifest["readable_by"] = [
        {"name": "vLLM", "how": "yes", "note": "0.12 and later"},
        {"name": "transformers", "how": "with import runtime", "note": ""},
    ]
    facts.manifest["bytes"] |= {"draft": 2_000_000, "total": 9_000_000}
    facts.manifest["evaluation"] = {"description": "the bundled heldout text"}
    facts.warnings = ["calibrated on text of another kind"]
    text = card(facts)
    for words in (
        "| vLLM | yes | 0.12 and later |", "vllm serve PATH", "import runtime", "AutoModelForCausalLM.from_pretrained",
        "| draft |  | 2.00 MB |", "| all that is loaded |  | 9.00 MB |", "measured on the bundled heldout text",
        "- calibrated on text of another kind",
    ):  # fmt: skip
        assert words in text, words
    facts.manifest["readable_by"] = [
        {"name": "vLLM", "how": "no", "note": ""},
        {"name": "transformers", "how": "yes", "note": ""},
    ]
    assert "vllm serve" not in card(facts)
    assert ModelCard(card(facts)).data.library_name == "transformers"


def test_a_model_of_the_hub_is_the_base_model(facts: Facts, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name--4b" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    told = describe_source(snapshot)
    assert told == {"repository": "org/name--4b", "revision": "0123abcd"}
    facts.manifest["source"] |= told
    found = ModelCard(card(facts)).data
    assert (found.base_model, found.base_model_relation) == ("org/name--4b", "quantized")


@pytest.mark.parametrize(
    "theirs", ["---\nlicense: [\n---\n", "---\n- a\n---\n", "\0\xff", "---\nlicense: {a: 1}\nlanguage: 3\n---\n"]
)
def test_a_readme_that_nobody_understands(tmp_path: Path, theirs: str) -> None:
    (tmp_path / "README.md").write_bytes(theirs.encode("latin-1"))
    assert isinstance(describe_source(tmp_path), dict)
