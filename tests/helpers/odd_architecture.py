"""An architecture that transformers has never heard of: nothing in it is named as in any of its families."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class OddConfig(PretrainedConfig):
    """`bank`: width of a matrix that is no linear layer; 0: there is none. `loose`: no list holds the blocks."""

    model_type = "oddformer"

    def __init__(
        self, vocab_size: int = 257, hidden_size: int = 64, num_hidden_layers: int = 2, num_attention_heads: int = 4,
        bank: int = 0, loose: bool = False, **rest: Any,
    ) -> None:  # fmt: skip
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.bank, self.loose = num_attention_heads, bank, loose
        self.max_position_embeddings = 128
        super().__init__(**rest)


class Cell(nn.Module):
    """Attention and a gated layer side by side; called by position, and gives its state with the mixing weight it used."""

    def __init__(self, config: OddConfig, number: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.number = config.num_attention_heads, number
        self.scale = nn.Parameter(torch.ones(size))
        self.read = nn.Linear(size, 3 * size, bias=False)
        self.tell = nn.Linear(size, size)
        self.widen, self.narrow = nn.Linear(size, 4 * size), nn.Linear(2 * size, size)
        if config.bank:
            self.bank = nn.Parameter(torch.randn(3, config.bank, size) / size)

    def forward(self, state: torch.Tensor, bias: torch.Tensor, kept: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """State `[b, s, hidden]` and what is added to scores `[b, 1, s, past + s]`."""
        x = state * self.scale / state.square().mean(-1, keepdim=True).add(1e-5).sqrt()
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.read(x).chunk(3, -1))
        if kept is not None:
            k, v = kept.update(k, v, self.number)
        mixing = (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1)
        attended = self.tell((mixing @ v).transpose(1, 2).flatten(2))
        gate, up = self.widen(x).chunk(2, -1)
        out = state + attended + self.narrow(gate.sigmoid() * up)
        if hasattr(self, "bank"):
            out = out + (x @ self.bank[0].T) @ self.bank[1]
        return out, mixing


class OddModel(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "trunk"
    supports_gradient_checkpointing = False

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0, 1.2 / module.weight.shape[-1] ** 0.5)


class OddForCausalLM(OddModel, GenerationMixin):
    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.trunk = nn.Module()
        cells = [Cell(config, number) for number in range(config.num_hidden_layers)]
        if config.loose:
            for number, cell in enumerate(cells):
                self.trunk.add_module(f"cell_{number}", cell)
        else:
            self.trunk.cells = nn.ModuleList(cells)
        self.say = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.say

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, past_key_values: Any = None,
        use_cache: bool = False, logits_to_keep: int = 0, **_: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        rows, length = input_ids.shape
        place = torch.arange(past + length)
        far = place[past:, None] - place[None]
        bias = torch.where(far < 0, -1e9, -0.05 * far.float()).expand(rows, 1, -1, -1).to(self.words.weight.dtype)
        if attention_mask is not None:
            bias = bias.masked_fill(attention_mask[:, None, None, : past + length] == 0, -1e9)
        state = self.words(input_ids)
        for cell in self.trunk.cells if hasattr(self.trunk, "cells") else self.trunk.children():
            state, _ = cell(state, bias, past_key_values)
        return CausalLMOutputWithPast(logits=self.say(state[:, -logits_to_keep:]), past_key_values=past_key_values)
