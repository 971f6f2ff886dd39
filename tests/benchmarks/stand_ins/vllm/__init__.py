"""Stand-in for vLLM: its calls as section `vllm` makes them, answered with token 0."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class SamplingParams:
    def __init__(self, *, max_tokens: int, temperature: float, ignore_eos: bool, detokenize: bool) -> None:
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model: str, *, load_format: str, dtype: str, skip_tokenizer_init: bool, **options: Any) -> None:
        config = json.loads((Path(model) / "config.json").read_text())
        assert (load_format, dtype, skip_tokenizer_init) == ("dummy", "bfloat16", True)
        assert config["architectures"] == ["LlamaForCausalLM"]
        if "w4" in Path(model).name:
            (group,) = config["quantization_config"]["config_groups"].values()
            assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (4, 128)

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        assert all(prompt["prompt_token_ids"] for prompt in prompts)
        output = SimpleNamespace(token_ids=[0] * params.max_tokens)
        return [SimpleNamespace(outputs=[output]) for _ in prompts]
