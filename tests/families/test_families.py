"""Every family from its checkpoint to a running artifact, held against transformers' own modules with the artifact's weights in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, Family
from sounds import write_sounds

import compress
import runtime
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.engines.blueprint import Blueprint
from runtime.layers.compressed_linear import CompressedLinear

W4 = {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}
RECIPES = {"W4": [W4], "2:4 W4": [{"prune": {"method": "sparsegpt", "pattern": "2:4"}}, W4]}
IDS = [3, 17, 80, 101, 5, 64, 33, 2, 90, 41, 12, 77]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i}: the square of {i} is {i * i}, its double {2 * i}.\n" for i in range(200)))
    return path


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sounds(tmp_path_factory.mktemp("sounds"), 8)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Family, Path]:
    return request.param, request.param.write(tmp_path_factory.mktemp(request.param.name) / "model")


@pytest.mark.sampled(2, 16)
@pytest.mark.parametrize("stages", RECIPES.values(), ids=RECIPES)
def test_from_checkpoint_to_artifact(
    source: tuple[Family, Path], stages: list[dict[str, Any]], text: Path, sounds: Path, tmp_path: Path
) -> None:
    family, path = source
    hears = family.extractor is not None
    calibration = {"data": str(sounds if hears else text), "samples": 8, "sequence_length": 32, "batch_size": 4}
    recipe = {"name": "test", "model": str(path), "calibration": calibration, "stages": stages}
    artifact = compress.apply(recipe, output=tmp_path / "out", quiet=True)  # which is held against the pipeline's own

    compressed = _compressed(artifact.path)
    assert {name for name, entry in artifact.manifest["tensors"].items() if entry["action"] == "compressed"} == {
        f"{name}.weight" for name in compressed
    }
    _nothing_else_changed(path, artifact)
    theirs = _theirs(family, path)
    _is_ignored_where_not_compressed(artifact.path, theirs)
    assert set(compressed) == _expected(family, theirs)
    model = runtime.load(artifact.path)
    _place(theirs, compressed, family)
    ids = torch.tensor([IDS])
    given = model.listener.file(sounds / "s0.wav") if hears else IDS
    source_name = theirs.main_input_name if hears else "input_ids"
    entering = {source_name: given[None] if hears else ids}
    with torch.inference_mode():
        if family.kind == "encoder":
            assert _distance(model.hidden_states(ids), theirs(input_ids=ids).last_hidden_state) < 1e-4
            return
        begun = {} if family.kind == "decoder" else {"decoder_input_ids": torch.tensor([[256]])}
        expected = theirs(**entering, use_cache=False, **begun).logits.float()
        loaded = type(theirs).from_pretrained(artifact.path, dtype=family.dtype).eval()
        assert _distance(loaded(**entering, use_cache=False, **begun).logits, expected) < 1e-4
    assert _distance(model.logits(*(entering | begun).values()), expected) < 1e-4
    model.tokenizer = None  # tokens in the place of texts, of models that hear too
    written = model.generate(given, max_new_tokens=6)
    assert len(written) <= 6
    assert written[0] == int(expected[0, -1].argmax())


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs.float()).norm() / theirs.float().norm())


def _compressed(path: Path) -> dict[str, torch.Tensor]:
    """{layer: its dense weight} of what is compressed."""
    module = Blueprint(Artifact(path), torch.device("cpu"), "reference", None, False).build_module()
    return {n: m.dequantize() for n, m in module.named_modules() if isinstance(m, CompressedLinear)}


def _nothing_else_changed(path: Path, artifact: Any) -> None:
    """What is copied has the source's values, under the source's names."""
    before, after = Checkpoint(path), Checkpoint(artifact.path)
    copied = [entry for entry in artifact.manifest["tensors"].values() if entry["action"] == "copied"]
    names = {name for entry in copied for name in entry["stored_as"]}
    whole = {name for name in names if before.has(name)}
    assert all(torch.equal(before.get(name), after.get(name)) for name in whole)
    # Biases of experts, which go where their weights go, and Kimi Linear's convolution, which transformers puts together of three.
    assert names - whole == {n for n in names if ".experts." in n or n.endswith("self_attn.conv1d.weight")}
    assert len(whole) >= 2  # embedding and head, where norms have no weights


def _is_ignored_where_not_compressed(path: Path, theirs: torch.nn.Module) -> None:
    """Other engines make a linear layer of every matrix, routers too, and look for packed weights where nothing says otherwise."""
    stored = Checkpoint(path)
    ignored = set(stored.config["quantization_config"]["ignore"])
    tables = {name.rpartition(".")[2] for name, m in theirs.named_modules() if isinstance(m, torch.nn.Embedding)}
    matrices = {
        n.removesuffix(".weight") for n in stored.names() if n.endswith(".weight") and len(stored.shape(n)) == 2
    }
    assert {name for name in matrices - ignored if name.rpartition(".")[2] not in tables} == set()


def _theirs(family: Family, path: Path) -> Any:
    import transformers

    kind = getattr(transformers, family.model) if family.model else transformers.AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=family.dtype).eval()


def _expected(family: Family, theirs: Any) -> set[str]:
    """Every linear layer of the blocks, with experts one by one; no router, no head, nothing of a vision tower."""
    found = set()
    for name, module in theirs.named_modules():
        leaf = name.rpartition(".")[2]
        if type(module).__name__ in ("Linear", "Conv1D", "FalconLinear"):
            elsewhere = any(part in name for part in ("vision", "visual", "projector", "pooler"))
            if not elsewhere and leaf not in family.kept:
                found.add(name)
        elif isinstance(getattr(module, "down_proj", None), torch.nn.Parameter):
            for number in range(len(module.down_proj)):
                found |= {f"{name}.{number}.{p}" for p in ("gate_proj", "up_proj", "down_proj")}
    return found


def _place(model: Any, weights: dict[str, torch.Tensor], family: Family) -> None:
    """Put dense weights into transformers' modules, as a reader of their code would."""
    for name, weight in weights.items():
        home, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(name)
        except AttributeError:
            experts, number = model.get_submodule(home.rpartition(".")[0]), int(home.rpartition(".")[2])
            held = experts.down_proj[number] if leaf == "down_proj" else experts.gate_up_proj[number]
            rows = held.data.T if family.name == "gpt_oss" else held.data
            if leaf != "down_proj":
                half = len(rows) // 2
                second = leaf == "up_proj"
                if family.name == "gpt_oss":
                    rows = rows[int(second) :: 2]
                else:
                    rows = rows[half:] if second else rows[:half]
            rows.copy_(weight)
            continue
        target = module.weight.data.T if type(module).__name__ == "Conv1D" else module.weight.data
        target.copy_(weight)
