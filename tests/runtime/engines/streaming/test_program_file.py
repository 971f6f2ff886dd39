"""Programs on disk: a model that was recognized before runs without transformers' code of it, and computes the same."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_models import BATCH, SCHEMES, compress, inside_blocks
from tiny_models import llama

import runtime
from runtime.engines import blueprint as blueprints
from runtime.engines.native.parts import linears
from runtime.engines.streaming import cache, program_file
from runtime.kernels.cpu import library
from runtime.system.self_hash import sealed_json

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C compiler: CC, cc, gcc or clang")

REPOSITORY = Path(__file__).parents[4]
PROMPT = [5, 6, 7]


@pytest.fixture
def skeletons(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Models of transformers that were built."""
    built: list[Any] = []
    build = blueprints.build_skeleton

    def counted(*arguments: Any, **named: Any) -> Any:
        built.append(build(*arguments, **named))
        return built[-1]

    monkeypatch.setattr(blueprints, "build_skeleton", counted)
    return built


def programs(home: Path) -> list[Path]:
    return sorted(home.glob("*/*.json"))


def facts(model: Any) -> list[Any]:
    """Numbers of a model's own that no load may change."""
    engine = model.engine
    tokens = model.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    return [
        tokens,
        model.logits(BATCH).tolist(),
        model.stats["weight_bytes"],
        engine.context_length,
        engine.description,
    ]


SCRIPT = """
import json, sys, runtime
from runtime.engines import choose
choose.SMALLEST = 0
model = runtime.load(sys.argv[1])
found = {
    "tokens": model.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True),
    "logits": model.logits([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]]).tolist(),
    "imported": [name for name in sys.modules if name.split(".")[0] == "transformers"],
}
found["text"] = model.generate("The cat", max_new_tokens=8, ignore_eos=True, stop=["zzz"])
found["chat"] = type(model.tokenizer).__module__.split(".")[0]
found["models"] = [name for name in sys.modules if name.endswith("modeling_llama")]
print(json.dumps(found))
"""


def test_a_second_process_imports_no_code_of_the_model(artifacts: dict[str, Path], home: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(artifacts["llama"])]
    first, second = (
        json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY).stdout)
        for _ in range(2)
    )
    assert first.pop("imported")
    assert first.pop("models") == ["transformers.models.llama.modeling_llama"]
    assert second.pop("imported") == []
    assert second.pop("models") == []
    assert first == second
    assert len(programs(home)) == 1


def test_modules_are_built_on_the_same_weights_when_something_asks_for_them(
    artifacts: dict[str, Path], skeletons: list[Any]
) -> None:
    first, second = (runtime.load(artifacts["llama"]) for _ in range(2))
    assert len(skeletons) == 1
    assert facts(first) == facts(second)
    assert len(skeletons) == 1
    assert first.explain() == second.explain()
    assert len(skeletons) == 2
    module = second.engine.module
    assert torch.equal(first.engine.torch_engine.logits(BATCH), second.engine.torch_engine.logits(BATCH))
    assert len(skeletons) == 2  # once
    parts = second.engine.parts
    mine = {linear.weight for block in parts.blocks for _, linear, _ in linears(block.ops, block.count)}
    theirs = {each.data_ptr() for name, each in module.named_buffers() if name.endswith("prepared_weight")}
    assert mine == theirs  # the same map of the same file
    assert module.get_input_embeddings().weight is module.get_output_embeddings().weight


@pytest.mark.parametrize(
    "options", [{"kv_cache": "kivi"}, {"drafter": "lookup"}, {"drafter": {"method": "early-exit", "layer": 2}}]
)
def test_policies_and_drafts_after_a_program_is_known(artifacts: dict[str, Path], options: dict[str, Any]) -> None:
    tokens = []
    for _ in range(2):
        runtime.load(artifacts["llama"])
        tokens.append(runtime.load(artifacts["llama"], **options).generate(PROMPT, max_new_tokens=12, ignore_eos=True))
    assert tokens[0] == tokens[1]


def test_scores_streams_and_sessions(artifacts: dict[str, Path], skeletons: list[Any]) -> None:
    first, second = (runtime.load(artifacts["llama"]) for _ in range(2))
    for use in (
        lambda model: model.score("The cat sat on the mat."),
        lambda model: "".join(model.stream("The cat", max_new_tokens=6, ignore_eos=True)),
        lambda model: model.session().generate(["The", "A cat"], max_new_tokens=4, ignore_eos=True),
        lambda model: (model.eos_token_ids, model.tokenizer("The cat")["input_ids"], len(model.tokenizer)),
    ):
        assert use(first) == use(second)  # type: ignore[no-untyped-call]
    assert len(skeletons) == 1


def test_without_a_tokenizer_texts_are_refused(tmp_path: Path) -> None:
    compress(llama(), tmp_path / "m", inside_blocks("pack-quantized"))
    for file in (tmp_path / "m").glob("tokenizer*"):
        file.unlink()
    for _ in range(2):
        model = runtime.load(tmp_path / "m")
        assert model.tokenizer is None
        with pytest.raises(runtime.RequestError, match="no tokenizer"):
            model.generate("a text")


def test_what_decides_a_program_is_in_its_key(
    artifacts: dict[str, Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skeletons: list[Any]
) -> None:
    path = shutil.copytree(artifacts["llama"], tmp_path / "copy")

    def is_read(**options: Any) -> bool:
        before = len(skeletons), len(programs(home))
        runtime.load(path, **options)
        after = len(skeletons), len(programs(home))
        assert after in (before, (before[0] + 1, before[1] + 1))
        return after != before

    assert is_read()
    assert not is_read()
    for options in ({"dtype": "bfloat16"}, {"kernels": "fast"}, {"trust_remote_code": True}):
        assert is_read(**options)
        assert not is_read(**options)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "5.0.1")
        assert is_read()
        assert not is_read()
    read = Path.read_bytes
    for name in ("read.py", "parts.py", "operations.h"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda self, n=name: read(self) + b"#" * (self.name == n))
            program_file.sources.cache_clear()
            assert is_read()
            assert not is_read()
    program_file.sources.cache_clear()
    assert not is_read()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.125}))
    before = runtime.load(artifacts["llama"]).logits(BATCH)
    assert is_read()
    for _ in range(2):
        assert not torch.equal(runtime.load(path).logits(BATCH), before)


def edited(file: Path, change: Any) -> None:
    """Damage that no digest shows."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(sealed_json(content))


DAMAGES = {
    "flipped": lambda f: f.write_bytes(f.read_bytes().replace(b'"width": 64', b'"width": 65', 1)),
    "truncated": lambda f: f.write_bytes(f.read_bytes()[:-500]),
    "empty": lambda f: f.write_bytes(b""),
    "no text": lambda f: f.write_bytes(bytes(range(256))),
    "no program": lambda f: edited(f, lambda content: content.pop("program")),
    "an operation that is none": lambda f: edited(f, lambda content: content["program"].update(type="Sum")),
    "a module that is none": lambda f: edited(f, lambda content: content["program"]["tail"][0]["weights"].update(at=1)),
    "too few modules": lambda f: edited(f, lambda content: content["packed"][0]["modules"].popitem()),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_program_is_read_again(
    artifacts: dict[str, Path], home: Path, skeletons: list[Any], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = facts(runtime.load(artifacts["llama"]))
    (file,) = programs(home)
    whole = file.read_bytes()
    DAMAGES[damage](file)
    assert file.read_bytes() != whole
    with caplog.at_level(logging.WARNING, "compress.cache"):
        assert facts(runtime.load(artifacts["llama"])) == expected
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the program of {artifacts['llama']} is read again: ")
    assert file.read_bytes() == whole
    assert len(skeletons) == 2
    runtime.load(artifacts["llama"])
    assert len(skeletons) == 2


def test_weights_that_it_was_not_read_with_are_not_used(
    artifacts: dict[str, Path], home: Path, makes: list[Path], skeletons: list[Any]
) -> None:
    runtime.load(artifacts["llama"])
    (file,) = programs(home)
    edited(file, lambda content: content.update(weights="0" * 64))
    runtime.load(artifacts["llama"])
    assert len(skeletons) == 2
    makes[0].unlink()
    runtime.load(artifacts["llama"])
    assert (len(skeletons), len(makes)) == (3, 2)
    runtime.load(artifacts["llama"])
    assert len(skeletons) == 3


def test_where_it_cannot_be_written(
    artifacts: dict[str, Path], home: Path, skeletons: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = cache.os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(".json"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("runtime.engines.streaming.program_file.os.replace", full)
    first, second = (runtime.load(artifacts["llama"]) for _ in range(2))
    assert facts(first) == facts(second)
    assert len(skeletons) == 2
    assert programs(home) == list(home.glob("*/*.tmp")) == []


def test_other_layers_than_a_decoder_in_c_runs_leave_none(artifacts: dict[str, Path], home: Path) -> None:
    runtime.load(artifacts["llama"], kernels="reference")
    assert programs(home) == []


def test_an_embedding_in_few_bits(tmp_path: Path, skeletons: list[Any]) -> None:
    scheme = ("packed", SCHEMES["pack-quantized"])
    model = llama(tie_word_embeddings=False)
    compress(
        model, tmp_path / "m", lambda name: scheme if name.endswith(("_proj", "embed_tokens", "lm_head")) else None
    )
    first, second = (runtime.load(tmp_path / "m") for _ in range(2))
    assert facts(first) == facts(second)
    assert len(skeletons) == 1
