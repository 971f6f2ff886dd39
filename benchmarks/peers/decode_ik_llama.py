"""ik_llama.cpp through ik-llama-cpp-python's C interface: the GGUF of `decode_llama_cpp.py`, repacked into interleaved rows as it loads.

The defaults otherwise: flash attention, fused gate and up, a cache of float16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ik_llama_cpp._ctypes_api as llama
import numpy as np
from decode_common import CachedEngine, DeepEngine, Shape, main, measure, measure_depths
from ik_llama_cpp._lib_loader import load_shared_library

FILE = "q4_0.gguf"
BATCH = 512
C = load_shared_library()
C.llama_batch_get_one.restype = llama.llama_batch
C.llama_state_seq_get_size.restype = ctypes.c_size_t
C.llama_state_seq_set_data.restype = ctypes.c_size_t


class Decoder(CachedEngine):
    """One context, two sequences: the second is for `repeat`."""

    def __init__(self, request: dict[str, Any]) -> None:
        llama.llama_backend_init()
        self.vocabulary = Shape.read(request["model"]).vocabulary
        settings = llama.llama_model_default_params()
        settings.use_mmap, settings.repack_tensors = False, True
        file = str(Path(request["path"]) / FILE).encode()
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


def load(request: dict[str, Any]) -> DeepEngine:
    return Decoder(request)


if __name__ == "__main__":
    actions = {
        "measure": lambda request: measure(request, load),
        "depths": lambda request: measure_depths(request, load),
    }
    main(actions, "ik-llama-cpp-python")
