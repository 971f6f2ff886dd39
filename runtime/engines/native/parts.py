"""Structures of decoder.h, made of the program of a Llama-like decoder: what C cannot compute is a reason, not a guess."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from runtime.engines import llama_structure
from runtime.engines.llama_structure import Program, read_program
from runtime.kernels.cpu import library
from runtime.kernels.cpu.decoder import Block, Decoder
from runtime.kernels.cpu.library import TYPES, Linear
from runtime.layers.native_experts import CLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Fields of the C structure of a block.
PROJECTIONS = ("query", "key", "value", "output")
MLP = ("gate", "up", "down")


class UnknownPartError(Exception):
    """A module that decoder.h cannot compute."""


class Structures(CLinear):
    """Modules in the structures of decoder.h; UnknownPartError where it cannot compute one. Layers of one decoder take the same digits."""

    def block(self, block: llama_structure.Block) -> Block:
        """A layer, without a cache."""
        modules = [*block.qkv.layers, block.output, *block.gate_up.layers, block.down]
        linear = {field: self.linear(module) for field, module in zip((*PROJECTIONS, *MLP), modules, strict=True)}
        found = Block(**linear, window=block.window)
        found.input_norm, found.mlp_norm = self.vector(block.input_norm), self.vector(block.mlp_norm)
        if block.norms is not None:
            found.query_norm, found.key_norm = (self.vector(norm) for norm in block.norms)
        return found

    def vector(self, weight: torch.Tensor) -> int:
        """Address of a weight in float32."""
        vector = weight.detach().float().contiguous()
        self.keep.append(vector)
        return vector.data_ptr()

    def linear(self, module: nn.Module) -> Linear:
        """The layer as C reads it; a dense one as it lies in memory."""
        found = self.of(module)
        if isinstance(found, str):
            raise UnknownPartError(found)
        return found


class Parts(Structures):
    """A program in the structures of decoder.h. `final_norm` is float32 `[hidden]`."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.rotation, self.vocabulary = program.rotation, program.vocabulary
        self.kv_heads, self.head_dim = program.kv_heads, program.head_dim
        self.cache_dtype = program.dtype
        self.final_norm = program.final_norm.float()
        self.blocks = [self.block(block) for block in program.blocks]
        head = self.linear(program.head)
        if len(self.digits) > 1:
            raise UnknownPartError("its layers round their inputs in different ways")
        self.decoder = Decoder(
            layers=len(self.blocks),
            hidden=len(self.final_norm),
            intermediate=max(block.gate.rows for block in self.blocks),
            heads=program.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rotary=2 * self.rotation(1)[0].shape[1],
            cache_type=TYPES[self.cache_dtype],
            digits=max(self.digits, default=1),
            eps=program.eps,
            scale=program.scale,
            final_norm=self.final_norm.data_ptr(),
            head=head,
        )


def read_parts(model: PreTrainedModel, device: torch.device) -> Parts | str:
    """The parts, or the reason why this model is not for the native engine."""
    program = read_program(model)
    if isinstance(program, str):
        return program
    if device.type != "cpu" or library.load() is None:
        return "it runs on CPUs" if device.type != "cpu" else "there is no C compiler"
    try:
        return Parts(program)
    except UnknownPartError as error:
        return str(error)
