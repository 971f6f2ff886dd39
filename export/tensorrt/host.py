"""A bundle's graph in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from runtime.decoding.loop import pad_left
from runtime.errors import CompressError


class NoKernelError(Exception):
    """ONNX Runtime has no kernel for an operator at a type; the message is its own."""


class HostSession:
    """The graph of `export.tensorrt.profiles.parsed_profiles`, logits and greedy tokens.

    Raises:
        NoKernelError: ONNX Runtime has no kernel for one of its operators at its type.
        CompressError: ONNX Runtime refuses the graph for any other reason, or fails while it runs: the graph is wrong.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime

        self.version = str(onnxruntime.__version__)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # The graph as it is written: fused, 4-bit products would round their inputs to int8, and fp8 ones are refused.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        with _told(path):
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._path = path
        self._past = {i.name: i for i in self._session.get_inputs() if i.name.startswith("past_key_values.")}
        self._takes = {i.name for i in self._session.get_inputs()}

    def run(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, past: dict[str, Any] | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Logits float32 `[batch, sequence, vocabulary]`, and what is `past` for the next step."""
        import numpy as np

        feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy()}
        feed = {name: value for name, value in feed.items() if name in self._takes}
        for name, value in self._past.items():
            kind = np.float16 if "float16" in value.type else np.float32
            feed[name] = past[name] if past else np.zeros((ids.shape[0], value.shape[1], 0, value.shape[3]), kind)
        names = ["logits", *(name.replace("past_key_values.", "present.") for name in self._past)]
        with _told(self._path):
            logits, *present = self._session.run(names, feed)
        return torch.from_numpy(logits).float(), dict(zip(self._past, present, strict=True))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Of every position, `[batch, sequence, vocabulary]`."""
        positions = torch.arange(rows.shape[1]).expand_as(rows)
        return self.run(rows, torch.ones_like(rows), positions, None)[0]

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy continuations of prompts of any lengths, as one batch padded on the left, through the cache."""
        ids, found, positions = pad_left(prompts, torch.device("cpu"))
        mask = torch.ones_like(ids) if found is None else found
        past: dict[str, Any] | None = None
        written: list[torch.Tensor] = []
        for _ in range(count):
            logits, past = self.run(ids, mask, positions, past)
            ids = logits[:, -1].argmax(-1, keepdim=True)
            written.append(ids)
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
            positions = positions[:, -1:] + 1
        rows: list[list[int]] = torch.cat(written, 1).tolist()
        return rows


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """ONNX Runtime's errors as ours. They have no common class but Exception; one of them alone means a missing kernel."""
    from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

    try:
        yield
    except NoKernel as error:
        raise NoKernelError(_first_line(error)) from error
    except Exception as error:
        raise CompressError(f"ONNX Runtime refuses {path.name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
