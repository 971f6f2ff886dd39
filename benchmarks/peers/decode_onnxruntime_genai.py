"""ONNX Runtime GenAI: its own model builder (int4, blocks of 128, int8 activations) and its generator."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decode_common import GROUP, DeepEngine, main, measure_depths


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    path = Path(request["path"])
    command = [
        sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", request["model"], "-o", str(path), "-p", "int4", "-e", "cpu",
        "-c", str(path / "cache"), "--extra_options", f"int4_block_size={GROUP}", "int4_accuracy_level=4",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": f"its model builder: {done.stderr.strip().splitlines()[-1][-300:]}"}
    return {}


class Decoder:
    """One generator a prompt; it samples, greedily, and keeps tokens and logits to itself."""

    def __init__(self, request: dict[str, Any]) -> None:
        import onnxruntime_genai as genai

        self.genai, self.context = genai, request["context"]
        config = genai.Config(request["path"])
        options = {"session_options": {"intra_op_num_threads": request["threads"]}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self.model = genai.Model(config)
        self.generator: Any = None

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        params = self.genai.GeneratorParams(self.model)
        params.set_search_options(max_length=self.context, do_sample=False)
        self.generator = self.genai.Generator(self.model, params)
        return self.extend(ids)

    def extend(self, ids: Sequence[int]) -> np.ndarray:
        self.generator.append_tokens(np.array([list(ids)], np.int32))
        return self.step(0)  # samples only: its logits are there

    def step(self, token: int) -> np.ndarray:
        self.generator.generate_next_token()
        return np.zeros(1)


def load(request: dict[str, Any]) -> DeepEngine:
    return Decoder(request)


if __name__ == "__main__":
    actions = {"prepare": prepare, "depths": lambda request: measure_depths(request, load)}
    main(actions, "onnxruntime", "onnxruntime-genai")
