"""The network definition: inputs and outputs of the ONNX file that was parsed into it."""

from __future__ import annotations

from typing import Any

import torch

from fake_tensorrt.listing import Listed, enums

TYPE = enums()["DataType"]
TORCH = {
    "FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


class ITensor(Listed):
    _name = "ITensor"


class INetworkDefinition(Listed):
    _name = "INetworkDefinition"

    @classmethod
    def _empty(cls) -> Any:
        made = cls._make()
        made._inputs, made._outputs, made._onnx = [], [], None
        return made

    def __getattr__(self, name: str) -> Any:
        counts = {"num_inputs": "_inputs", "num_outputs": "_outputs"}
        if name == "num_layers":
            return 7
        return len(getattr(self, counts[name])) if name in counts else super().__getattr__(name)

    def do_get_input(self, index: int) -> Any:
        return self._inputs[index]

    def do_get_output(self, index: int) -> Any:
        return self._outputs[index]


CLASSES = (ITensor, INetworkDefinition)
