"""ONNX Runtime's own way to int4: transformers' exporter with its ONNX Runtime fusions, then `MatMulNBitsQuantizer` (round to nearest).

python ort_int4_route.py prepare MODEL DIRECTORY      writes model.onnx
python ort_int4_route.py run DIRECTORY THREADS PROMPT_TOKENS NEW_TOKENS REPEAT      prints one JSON object
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

GROUP, LEVEL = 128, 4  # as ours: groups of 128; level 4 is ONNX Runtime's default, activations rounded to int8


def prepare(model_path: str, directory: Path) -> None:
    import onnx
    import torch
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    config = model.config
    cache = DynamicCache(config=config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = torch.zeros(1, config.num_key_value_heads, 5, head)
        cache.update(states, states.clone(), layer)
    inputs = {
        "input_ids": torch.ones(1, 3, dtype=torch.int64),
        "attention_mask": torch.ones(1, 8, dtype=torch.int64),
        "position_ids": torch.arange(5, 8)[None],
        "past_key_values": cache,
    }
    free = torch.export.Dim.DYNAMIC
    # A batch of one: the exporter fuses its grouped-query attention only then.
    shapes = {"input_ids": {1: free}, "attention_mask": {1: free}, "position_ids": {1: free}}
    shapes["past_key_values"] = [{2: free}] * (2 * config.num_hidden_layers)
    with torch.no_grad():
        exported = OnnxExporter().export(
            model, inputs, config=OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=21, ort_fusions="cpu")
        )
    dense = directory / "dense"
    dense.mkdir(parents=True, exist_ok=True)
    exported.save_pretrained(dense)
    del model, exported
    file = next(dense.glob("*.onnx"))
    quantizer = MatMulNBitsQuantizer(onnx.load(str(file)), block_size=GROUP, is_symmetric=True, accuracy_level=LEVEL)
    quantizer.process()
    quantizer.model.save_model_to_file(str(directory / "model.onnx"), use_external_data_format=True)
    for left in dense.iterdir():
        left.unlink()


class Decoder:
    """One session; keys and values stay in ONNX Runtime's memory."""

    def __init__(self, directory: Path, threads: int) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = ort.InferenceSession(str(directory / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.ort = ort
        self.past = [v for v in self.session.get_inputs() if len(v.shape) == 4]
        self.present = [v.name for v in self.session.get_outputs()[1:]]
        self.logits = self.session.get_outputs()[0].name

    def start(self) -> None:
        empty = [
            self.ort.OrtValue.ortvalue_from_numpy(np.zeros((1, v.shape[1], 0, v.shape[3]), np.float32))
            for v in self.past
        ]
        self.cache, self.length = empty, 0

    def step(self, ids: list[int]) -> int:
        binding = self.session.io_binding()
        positions = np.arange(self.length, self.length + len(ids), dtype=np.int64)[None]
        self.length += len(ids)
        feeds = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, self.length), np.int64),
            "position_ids": positions,
        }
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for value, tensor in zip(self.past, self.cache, strict=True):
            binding.bind_ortvalue_input(value.name, tensor)
        binding.bind_output(self.logits, "cpu")
        for name in self.present:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        first, *self.cache = binding.get_outputs()
        return int(first.numpy()[0, -1].argmax())


def run(directory: Path, threads: int, prompt: int, new: int, repeat: int) -> dict[str, object]:
    start = time.perf_counter()
    decoder = Decoder(directory, threads)
    load = time.perf_counter() - start
    ids = np.random.default_rng(0).integers(0, 1000, prompt).tolist()

    def once(count: int) -> tuple[float, float]:
        decoder.start()
        begin = time.perf_counter()
        token = decoder.step(ids)
        middle = time.perf_counter()
        for _ in range(count - 1):
            token = decoder.step([token])
        return middle - begin, time.perf_counter() - middle

    once(4)
    rounds = [once(new) for _ in range(repeat)]
    prefill, decode = (statistics.median(values) for values in zip(*rounds, strict=True))
    return {
        "load_seconds": load,
        "prefill_tokens_per_second": prompt / prefill,
        "decode_tokens_per_second": (new - 1) / decode,
    }


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        prepare(sys.argv[2], Path(sys.argv[3]))
    else:
        numbers = [int(value) for value in sys.argv[3:]]
        print(json.dumps(run(Path(sys.argv[2]), *numbers)))
