"""OpenVINO GenAI: the graph of `decode_openvino.py` with the inputs that its LLM pipeline wants; paged attention, its own clock.

The pipeline's defaults: a cache of 8-bit integers, and scheduling in chunks of the prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from decode_common import Checkpoint, Generate, Shape, main, measure_prompts, rtn
from decode_openvino import FILE, Builder, integers, linear, norm, parameter
from openvino import opset13 as op


class PipelineBuilder(Builder):
    """Which keys a query sees comes from the mask of tokens and the positions."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s)
        self.tokens_mask = parameter("attention_mask", [1, -1], np.int64)
        length = op.gather(op.shape_of(self.tokens_mask), op.constant(np.int64(1)), op.constant(np.int64(0)))
        keys = op.range(op.constant(np.int64(0)), length, op.constant(np.int64(1)), output_type="i64")
        sees = op.less_equal(op.unsqueeze(keys, integers(0, 1, 2)), op.unsqueeze(self.positions, integers(1, 3)))
        self.mask = op.select(sees, np.float32(0), np.float32(np.finfo(np.float32).min))


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    s, source = Shape.read(request["model"]), Checkpoint(request["model"])
    if s.experts:
        return {"error": "no route for a mixture: optimum-intel would write one, and the graph written here is dense"}
    b = PipelineBuilder(s)
    embed = op.convert(op.constant(source.array("model.embed_tokens.weight").astype(np.float16)), "f32")
    x = op.gather(embed, b.ids, op.constant(np.int64(0)))
    for i in range(s.layers):
        x = b.block(x, i, source)
    logits = linear(norm(x, source.array("model.norm.weight"), s.eps), *rtn(source.array("lm_head.weight")))
    result = op.result(logits, "logits")
    result.output(0).get_tensor().set_names({"logits"})
    model = ov.Model([result], b.sinks, [b.ids, b.tokens_mask, b.positions, b.beam], "decoder")
    path = Path(request["path"])
    path.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, path / f"openvino_{FILE}", compress_to_fp16=False)
    write_tokenizer(Path(request["model"]), path)
    return {}


def write_tokenizer(source: Path, path: Path) -> None:
    """The pipeline does not load without one."""
    import openvino_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = openvino_tokenizers.convert_tokenizer(PreTrainedTokenizerFast.from_pretrained(source), with_detokenizer=True)
    for model, name in zip(made, ("tokenizer", "detokenizer"), strict=True):
        ov.save_model(model, path / f"openvino_{name}.xml")


def load(request: dict[str, Any]) -> Generate:
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(request["path"], "CPU", INFERENCE_NUM_THREADS=request["threads"])

    def generate(ids: list[int], new: int) -> tuple[float, float]:
        config = openvino_genai.GenerationConfig(max_new_tokens=new + 1, ignore_eos=True)
        numbers = np.array([ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(ov.Tensor(numbers), ov.Tensor(np.ones_like(numbers)))
        metrics = pipeline.generate(inputs, config).perf_metrics
        if metrics.get_num_generated_tokens() != new + 1:
            raise RuntimeError(f"{metrics.get_num_generated_tokens()} tokens, not {new + 1}")
        first = metrics.get_ttft().mean / 1e3
        return first, metrics.get_generate_duration().mean / 1e3 - first

    return generate


if __name__ == "__main__":
    actions = {"prepare": prepare, "depths": lambda request: measure_prompts(request, load)}
    main(actions, "openvino", "openvino-genai")
