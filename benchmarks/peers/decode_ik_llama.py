"""ik_llama.cpp through ik-llama-cpp-python's C interface: the GGUF of `decode_llama_cpp.py`, repacked into interleaved rows as it loads.

The defaults otherwise: flash attention, fused gate and up, a cache of float16.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ik_llama_cpp._ctypes_api as llama
import numpy as np
from decode_common import CachedEngine, DeepEngine, Shape, main, measure, measure_depths
from gguf_blocks import BF16, enlarge
from ik_llama_cpp._lib_loader import load_shared_library
from window_quality import llama_divergence

FILE = "q4_0.gguf"
BATCH = 512
C = load_shared_library()
C.llama_batch_get_one.restype = llama.llama_batch
C.llama_state_seq_get_size.restype = ctypes.c_size_t
C.llama_state_seq_set_data.restype = ctypes.c_size_t
C.ggml_row_size.restype = ctypes.c_size_t
C.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
C.ggml_blck_size.restype = ctypes.c_int64
#: `llama_ftype` of ik_llama.cpp, by name: its Python module has none.
TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15,
    "Q5_K_S": 16, "Q5_K_M": 17, "IQ2_XXS": 19, "IQ2_XS": 20, "Q2_K_S": 21, "IQ3_XS": 22, "IQ3_XXS": 23, "IQ4_NL": 25, "IQ3_S": 26,
    "IQ3_M": 27, "IQ2_S": 28, "IQ2_M": 29, "IQ4_XS": 30, "Q6_0": 135, "IQ2_K": 138, "IQ3_K": 139, "IQ4_K": 140, "IQ5_K": 141,
    "IQ4_KS": 145, "IQ3_KL": 146, "IQ2_KS": 147, "IQ4_KSS": 148, "IQ5_KS": 150, "IQ2_KT": 151, "IQ3_KT": 152, "IQ4_KT": 153,
    "IQ3_KS": 154, "IQ2_KL": 155,
}  # fmt: skip


class Decoder(CachedEngine):
    """One context, two sequences: the second is for `repeat`."""

    def __init__(self, request: dict[str, Any]) -> None:
        llama.llama_backend_init()
        self.vocabulary = Shape.read(request["model"]).vocabulary
        settings = llama.llama_model_default_params()
        settings.use_mmap, settings.repack_tensors = False, True
        file = str(Path(request["path"]) / request.get("file", FILE)).encode()
        self.model = llama.llama_model_load_from_file(file, settings)
        if not self.model:
            raise RuntimeError(f"ik_llama.cpp cannot load {file.decode()}")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 2 * request["context"], BATCH, BATCH, 2
        params.n_threads = params.n_threads_batch = request["threads"]
        self.context = ctypes.c_void_p(llama.llama_init_from_model(self.model, params))
        if not self.context:
            raise RuntimeError("ik_llama.cpp cannot make a context")
        self.length = 0

    def run(self, ids: Sequence[int]) -> np.ndarray:
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            array = (llama.llama_token * len(part))(*part)
            batch = C.llama_batch_get_one(array, len(part), llama.llama_pos(self.length), 0)
            code = llama.llama_decode(self.context, batch)
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
            self.length += len(part)
        return np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), (self.vocabulary,)).copy()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        llama.llama_kv_cache_clear(self.context)
        self.length = 0
        return self.run(ids)

    def repeat(self, length: int) -> None:
        """Cells of the sequence are copied behind it until it is `length` long; the copied keys are turned to their places."""
        while self.length < length:
            size = C.llama_state_seq_get_size(self.context, 0, 0)
            state = (ctypes.c_uint8 * size)()
            C.llama_state_seq_get_data(self.context, state, ctypes.c_size_t(size), 0, 0)
            if not C.llama_state_seq_set_data(self.context, state, ctypes.c_size_t(size), 1, 0):
                raise RuntimeError("ik_llama.cpp cannot copy a sequence")
            more = min(self.length, length - self.length)
            C.llama_kv_cache_seq_rm(self.context, 1, more, -1)
            C.llama_kv_cache_seq_add(self.context, 1, 0, -1, self.length)
            C.llama_kv_cache_seq_cp(self.context, 1, 0, -1, -1)
            C.llama_kv_cache_seq_rm(self.context, 1, -1, -1)
            self.length += more


class QuantizeParams(ctypes.Structure):
    """`llama_model_quantize_params`."""

    _fields_ = (
        ("nthread", ctypes.c_int32), ("ftype", ctypes.c_int), ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int), ("types", ctypes.c_int * 9), ("flags", ctypes.c_bool * 9),
        ("imatrix", ctypes.c_void_p), ("others", ctypes.c_void_p * 3),
    )  # fmt: skip


def importance_map(file: str) -> ctypes.c_void_p:
    """The C++ map that ik_llama.cpp wants, made by a few lines of C++ that are compiled here."""
    source, names = Path(__file__).with_name("importance_map.cpp"), np.load(file)
    library = Path(file).with_suffix(".so")
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    made = ctypes.CDLL(str(library))
    made.make.restype = ctypes.c_void_p
    found = ctypes.c_void_p(made.make())
    for name in names.files:
        values = np.ascontiguousarray(names[name], np.float32)
        made.put(found, name.encode(), values.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.size))
    return found


def quantize(request: dict[str, Any]) -> dict[str, Any]:
    """A GGUF of `original` in one of ik_llama.cpp's mixtures, embedding and output aside."""
    C.llama_model_quantize_default_params.restype = QuantizeParams
    settings = C.llama_model_quantize_default_params()
    settings.nthread, settings.ftype = request["threads"], TYPES[request["type"]]
    settings.token_embedding_type = settings.output_tensor_type = BF16
    settings.imatrix = importance_map(request["importance"])
    original, output = str(request["original"]).encode(), str(request["output"]).encode()
    if code := C.llama_model_quantize(original, output, ctypes.byref(settings)):
        raise RuntimeError(f"llama_model_quantize to {request['type']} gave {code}")
    return {"bytes": Path(request["output"]).stat().st_size}


def quality(request: dict[str, Any]) -> dict[str, Any]:
    """KL divergence and perplexity of a file."""
    decoder = Decoder(request)
    return llama_divergence(request, llama, decoder, lambda: llama.llama_kv_cache_clear(decoder.context))


def load(request: dict[str, Any]) -> DeepEngine:
    return Decoder(request)


if __name__ == "__main__":
    actions = {
        "measure": lambda request: measure(request, load),
        "depths": lambda request: measure_depths(request, load),
        "quantize": quantize,
        "enlarge": lambda request: enlarge(request, C.ggml_row_size, C.ggml_blck_size),
        "quality": quality,
    }
    main(actions, "ik-llama-cpp-python")
