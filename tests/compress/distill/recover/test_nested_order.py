"""Channels are put in the order of their rank only where the model computes the same then."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from compress.distill.recover.nested import feed_forward, order
from compress.model.streamed import StreamedModel
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError


def test_channels_that_stand_otherwise_are_not_put_in_order(tmp_path: Path) -> None:
    """Gate and up in one tensor, taken for pairs."""
    config = Phi3Config(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    Phi3ForCausalLM(config).save_pretrained(tmp_path)
    streamed, ids = StreamedModel(Checkpoint(tmp_path)), torch.randint(2, 260, (4, 16))
    right = feed_forward(streamed)
    wrong = [replace(one, slices=tuple(replace(part, parts=()) for part in one.slices)) for one in right]
    for channels, refused in ((right, nullcontext()), (wrong, pytest.raises(RequestError, match="set order: false"))):
        model = Phi3ForCausalLM.from_pretrained(tmp_path).eval()
        with refused:
            order(model, streamed, channels, ids)
