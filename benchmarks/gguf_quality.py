"""Quality of our k-quants beside those of llama.cpp's quantizer with its importance matrix, at the same types of the same tensors.

    python benchmarks/gguf_quality.py --output benchmarks/results/gguf_quality.json

Needs llama-cpp-python. llama.cpp quantizes the bundled checkpoint (`llama_model_quantize`; the importance matrix is the mean square of
every input over the calibration tokens that ours gets). A case is one type for all linear layers (`pure`), or one of llama.cpp's
mixtures (Q4_K_M); ours then takes for every layer the type that llama.cpp gave it. Embedding, tied to the output, and norms stay as they
are in both. All files are read by the `gguf` package, and their values computed with by transformers in float32: KL to the original
and perplexity of the held-out text.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy
import torch
from importance import mean_squares
from transformers import AutoModelForCausalLM, AutoTokenizer
from where import commit, cpu_name, memory_gb

import compress
import export
from compress.core.resources import recipes_directory
from compress.data import load, load_evaluation
from compress.recipe.models import CalibrationConfig, EvaluateConfig
from export.gguf import families
from export.source import Source

CHECKPOINT = recipes_directory() / "checkpoints" / "stdlib-4m"
SAMPLES, LENGTH, SEED, BATCH = 128, 256, 0, 16
PURE = {
    "Q2_K": "Q2_K",
    "Q3_K": "Q3_K_S",
    "Q4_K": "Q4_K_S",
    "Q5_K": "Q5_K_S",
    "Q6_K": "Q6_K",
    "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
}
MIXED = ("Q3_K_M", "Q4_K_M", "Q5_K_M")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gguf_quality.json"))
    parser.add_argument("--only", default="", help="cases, separated by commas; all where none is named")
    parser.add_argument("--windows", type=int, default=128, help="of the held-out text, from its beginning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    cases = [(f"{kind} everywhere", PURE[kind], True) for kind in PURE] + [
        (f"{kind} mixture", kind, False) for kind in MIXED
    ]
    cases = [case for case in cases if not arguments.only or case[0] in arguments.only.split(",")]
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), arguments.windows)
        for name, kind, pure in cases:
            rows[name] = bench.case(kind, pure)
            print(json.dumps({name: rows[name]}), flush=True)
            _write(arguments.output, bench, rows)


def _write(file: Path, bench: Bench, rows: dict[str, Any]) -> None:
    result = {
        "machine": {"cpu": cpu_name(), "memory_gb": memory_gb(), "threads": 1},
        "commit": bench.commit,
        "llama_cpp": f"llama-cpp-python {version('llama-cpp-python')}",
        "model": CHECKPOINT.name,
        "setting": {
            "calibration": {"data": "bundled", "samples": SAMPLES, "sequence_length": LENGTH, "seed": SEED},
            "heldout_windows": len(bench.windows), "window_tokens": LENGTH, "ours": "gptq",
        },
        "original_perplexity": bench.original_perplexity,
        "rows": rows,
    }  # fmt: skip
    file.write_text(json.dumps(result, indent=2) + "\n")


class Bench:
    """The checkpoint, its tokens, and a folder to work in."""

    def __init__(self, folder: Path, windows: int) -> None:
        self.folder, self.source, self.commit = folder, Source(CHECKPOINT), commit()
        self.model: Any = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        tokenizer, size = AutoTokenizer.from_pretrained(CHECKPOINT), self.model.config.vocab_size
        wanted = CalibrationConfig(samples=SAMPLES, sequence_length=LENGTH, seed=SEED)
        self.calibration = torch.cat([ids for ids, _ in load(wanted, tokenizer, size).batches])
        self.windows = load_evaluation(EvaluateConfig(sequence_length=LENGTH), tokenizer, size).ids[:windows]
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.reference = [self._log_probabilities(rows) for rows in self.windows.split(BATCH)]
        self.original_perplexity = self.measure({})["perplexity"]
        export.export(CHECKPOINT, "gguf", folder / "original", quiet=True, verify=False, dense="f32")
        self.names = {name: parameter for parameter, name in families.names(self.source).items()}
        self.importance = self._importance()

    def case(self, kind: str, pure: bool) -> dict[str, Any]:
        """llama.cpp's quantizer and ours, on the same types."""
        file = self.folder / "llama.gguf"
        self._quantize(file, kind, pure)
        types, tensors = self._read(file)
        row: dict[str, Any] = {"bits": self._bits(file), "types": {k: len(v) for k, v in _by_type(types).items()}}
        row["llama.cpp"] = self.measure(tensors)
        stages = [
            {"quantize": {"method": "gptq", "scheme": own, "targets": sorted(modules), "ignore": []}}
            for own, modules in _by_type(types).items()
        ]
        recipe = {
            "name": "gguf_quality",
            "model": str(CHECKPOINT),
            "calibration": {"data": "bundled", "samples": SAMPLES, "sequence_length": LENGTH, "seed": SEED},
            "stages": stages,
            "evaluate": {"samples": 4, "max_kl": "none", "min_agreement": "none"},
        }
        artifact = compress.apply(recipe, output=self.folder / "artifact", quiet=True, overwrite=True).path
        export.export(artifact, "gguf", self.folder / "ours", quiet=True, verify=False, overwrite=True)
        found, values = self._read(self.folder / "ours" / "model.gguf")
        assert found == types
        assert self._bits(self.folder / "ours" / "model.gguf") == row["bits"]
        row["ours"] = self.measure(values)
        return row

    def measure(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """KL to the original in nats a token, and perplexity, with these tensors instead of the original's."""
        self.model.load_state_dict(self.weights | dict(tensors))
        divergence = loss = 0.0
        for rows, expected in zip(self.windows.split(BATCH), self.reference, strict=True):
            found = self._log_probabilities(rows)
            divergence += float((expected.exp() * (expected - found)).sum())
            loss -= float(found[:, :-1].gather(-1, rows[:, 1:, None]).sum())
        self.model.load_state_dict(self.weights)
        scored = self.windows[:, 1:].numel()
        return {"kl": divergence / self.windows.numel(), "perplexity": math.exp(loss / scored)}

    def _log_probabilities(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model(rows).logits.float().log_softmax(-1)

    def _importance(self) -> dict[str, torch.Tensor]:
        """Mean square of every input, by the tensor's name in the file."""
        own = families.names(self.source)
        return {str(own[p]): mean for p, mean in mean_squares(self.model, self.calibration.split(BATCH)).items()}

    def _quantize(self, file: Path, kind: str, pure: bool) -> None:
        """llama.cpp's file; every linear layer has its importance."""
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.nthread = 1
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        settings.token_embedding_type = settings.output_tensor_type = int(gguf.GGMLQuantizationType.BF16)
        settings.pure = pure
        entries = (llama_cpp.llama_model_imatrix_data * (len(self.importance) + 1))()
        for entry, (name, values) in zip(entries, self.importance.items(), strict=False):
            entry.name, entry.size = name.encode(), values.numel()
            entry.data = ctypes.cast(values.data_ptr(), ctypes.POINTER(ctypes.c_float))
        settings.imatrix = entries
        log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
        original = self.folder / "original" / "model.gguf"
        code = llama_cpp.llama_model_quantize(str(original).encode(), str(file).encode(), ctypes.byref(settings))
        if code != 0:
            raise RuntimeError(f"llama_model_quantize to {kind} gave {code}")

    def _read(self, file: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        """{module: type} of linear layers, and {parameter: values} of all tensors that transformers has."""
        types, values = {}, {}
        for tensor in gguf.GGUFReader(file).tensors:
            parameter = self.names[tensor.name]
            dense = torch.from_numpy(numpy.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
            heads = families.heads_of(self.source, tensor.name)
            if heads is not None:
                order = families.permuted_rows(dense.shape[0], heads)
                dense = torch.empty_like(dense).index_copy_(0, order, dense)
            values[parameter] = dense.float()
            if tensor.name in self.importance:
                types[parameter.removesuffix(".weight")] = tensor.tensor_type.name
        return types, values

    def _bits(self, file: Path) -> float:
        """Bits a weight of the linear layers."""
        layers = [tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name in self.importance]
        return 8 * sum(int(t.n_bytes) for t in layers) / sum(int(t.n_elements) for t in layers)


def _by_type(types: Mapping[str, str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for module, kind in types.items():
        found[kind].append(module)
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
