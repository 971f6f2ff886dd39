"""The stage `recover` of a model with routed experts: what is trained of each is what is written, and what is settled of it stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import compress
import runtime
from compress.distill.recover import recovery
from compress.distill.train.data import split_rows
from compress.model.context import Context
from compress.model.streamed import StreamedModel
from compress.recipe import load as load_recipe
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import CompressError
from runtime.layers.compressed_linear import CompressedLinear

GRID = {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}
SPARSE = {"prune": {"method": "sparsegpt", "pattern": "2:4"}}


def recover(**fields: Any) -> dict[str, Any]:
    small = {"samples": 48, "sequence_length": 32, "steps": 6, "batch_size": 8, "evaluate_every": 3}
    return {"recover": {"method": "finetune", **small, **fields}}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    return found


def dense(path: Path) -> dict[str, torch.Tensor]:
    """Of each expert's layers, what the artifact computes with."""
    module = runtime.load(path, kernels="reference").engine.module
    held = {name: layer for name, layer in module.named_modules() if isinstance(layer, CompressedLinear)}
    return {n: layer.compressed_weight().dequantize() for n, layer in held.items() if ".experts." in n}


@pytest.mark.sampled(1, 1)
@pytest.mark.parametrize("stages", [(GRID,), (SPARSE,), (SPARSE, GRID)], ids=["grid", "sparse", "both"])
def test_what_compression_made_of_experts_is_where_recovery_begins(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, stages: Any
) -> None:
    """With steps too small to change anything it is what comes of it: not the weights that experts had before."""
    source = make_checkpoint("mixtral", dtype=torch.float32)
    before = compress.apply(recipe(source, *stages), output=tmp_path / "before", quiet=True)
    made = compress.apply(recipe(source, *stages, recover(learning_rate=1e-12)), output=tmp_path / "made", quiet=True)
    one, other = tensors(before.path), tensors(made.path)
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
    assert any("block_sparse_moe.experts.3.w2." in name for name in one)


@pytest.mark.slow
def test_what_experts_learn_is_written(make_checkpoint: Any, recipe: Any, tmp_path: Path) -> None:
    source = make_checkpoint("mixtral", dtype=torch.float32)
    before = compress.apply(recipe(source, SPARSE), output=tmp_path / "before", quiet=True)
    stage = recover(learning_rate=1e-3, steps=30, samples=160, evaluate_every=10)
    request = recipe(source, SPARSE, stage)
    made = compress.apply(request, output=tmp_path / "made", quiet=True)
    (facts,) = made.manifest["passes"]
    assert facts["after"]["loss"] < 0.9 * facts["before"]["loss"]
    one, other = dense(before.path), dense(made.path)
    assert one.keys() == other.keys()
    assert len(one) == 2 * 4 * 3
    for name, weight in other.items():
        assert not torch.equal(weight, one[name]), name
        assert not bool(weight[one[name] == 0].any()), name
    # What was measured in training is what the artifact gives on the same rows: an expert that was not written would show.
    loaded = load_recipe(request)
    _, ids = split_rows(recovery.rows(Context.open(loaded, Checkpoint(source), "cpu"), loaded.stages[-1])[0])
    for path, when in ((before.path, "before"), (made.path, "after")):
        logits = runtime.load(path, kernels="reference").logits(ids).float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        assert math.exp(float(loss)) == pytest.approx(facts[f"perplexity_{when}"], rel=1e-3)


def test_a_tensor_that_was_not_trained_is_not_written_as_it_was(make_checkpoint: Any, tmp_path: Path) -> None:
    streamed = StreamedModel(Checkpoint(make_checkpoint("mixtral", dtype=torch.float32)))
    model = AutoModelForCausalLM.from_pretrained(streamed.checkpoint.path, dtype=torch.float32)
    del model.model.layers[1].mlp.experts.down_proj
    with pytest.raises(CompressError, match=r"model.layers.1.mlp.experts.down_proj"):
        recovery.write(model, streamed, tmp_path / "out")


def test_weights_of_experts_begin_between_the_codes_that_their_originals_were_rounded_to(
    make_checkpoint: Any, recipe: Any, tmp_path: Path
) -> None:
    source = make_checkpoint("mixtral", dtype=torch.float32)
    request = recipe(source, GRID)
    before = compress.apply(request, output=tmp_path / "before", quiet=True)
    context = Context.open(load_recipe(request), Checkpoint(source), "cpu")
    model, held = recovery.whole(before.path, torch.device("cpu"))
    files, published = tensors(source), {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    experts = [name for name in held if ".experts." in name]
    assert len(experts) == 24
    for name in experts:
        home, _, projection = name.replace(".mlp.", ".block_sparse_moe.").rpartition(".")
        original = recovery.original_weight(model, context, name)
        assert original is not None
        assert torch.equal(original, files[f"{home}.{published[projection]}.weight"])
