"""A model streamed block by block computes what the whole model computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.model.hidden_states import HiddenStates
from compress.model.streamed import StreamedModel, run_blocks
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import ArtifactError


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "opt", "qwen2"])
def test_logits_equal_the_whole_model(make_checkpoint, family):
    path = make_checkpoint(family, dtype=torch.float32)
    ids = torch.randint(0, 257, (3, 24))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 17:] = False
    streamed = StreamedModel(Checkpoint(path))
    batches = [(ids[:2], mask[:2]), (ids[2:], None)]
    states = run_blocks(streamed, batches, None)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for number, (rows, valid) in enumerate(batches):
            expected = whole(rows, attention_mask=None if valid is None else valid.long()).logits
            ours = streamed.outputs(states.get(number))
            keep = torch.ones_like(rows, dtype=torch.bool) if valid is None else valid
            torch.testing.assert_close(ours[keep], expected[keep], rtol=1e-4, atol=1e-4)


def test_only_one_block_is_in_memory(make_checkpoint):
    streamed = StreamedModel(Checkpoint(make_checkpoint(num_hidden_layers=4)))
    streamed.load_outside()
    with streamed.loaded_block(1):
        real = [
            i for i, block in enumerate(streamed.blocks) if any(p.device.type != "meta" for p in block.parameters())
        ]
    assert real == [1]
    assert all(p.device.type == "meta" for p in streamed.blocks.parameters())


def test_spilled_states_are_the_states(make_checkpoint, tmp_path):
    path = make_checkpoint()
    batches = [(torch.randint(0, 257, (2, 16)), None) for _ in range(3)]
    kept = run_blocks(StreamedModel(Checkpoint(path)), batches, None)
    spilled = run_blocks(StreamedModel(Checkpoint(path)), batches, tmp_path / "spill")
    assert all(torch.equal(kept.get(i), spilled.get(i)) for i in range(3))
    assert (tmp_path / "spill").is_dir()
    spilled.drop()
    assert not (tmp_path / "spill").exists()


def test_a_commit_of_spilled_states_is_not_written_over(tmp_path):
    states = HiddenStates(1, tmp_path / "next")
    states.put(0, torch.zeros(2))
    states.persist(tmp_path / "hidden-1")
    states.put(0, torch.ones(2))
    assert torch.equal(states.get(0), torch.zeros(2))
    again = HiddenStates.load(tmp_path / "hidden-1", 1, None)
    assert torch.equal(again.get(0), torch.zeros(2))
    states.persist(tmp_path / "hidden-2")
    assert torch.equal(states.get(0), torch.ones(2))


def test_wrong_shape_and_missing_tensor_are_named(make_checkpoint):
    from safetensors.torch import load_file, save_file

    path = make_checkpoint()
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:, :-1].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"model.layers.1.mlp.up_proj.weight .*\[96, 63\].*\[96, 64\]"):
        StreamedModel(Checkpoint(path))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        StreamedModel(Checkpoint(path))
