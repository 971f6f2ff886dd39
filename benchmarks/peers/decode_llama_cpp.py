"""llama.cpp through llama-cpp-python's low-level API: a GGUF with Q4_0 for every matrix, written from the same checkpoint.

`matvec` calls ggml itself: products of its graph on the CPU backend, with the repacked layout that llama.cpp uses and without.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from decode_common import (
    CachedEngine,
    Checkpoint,
    Engine,
    Shape,
    dequantize,
    main,
    matvec_data,
    measure,
    measure_depths,
    time_matvec,
)
from gguf_blocks import BF16, enlarge
from window_quality import llama_divergence

FILE = "q4_0.gguf"
Q4_0, F32 = 2, 0  # ggml types
BATCH = 512


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp wants them: its rotary embedding turns neighbours, transformers' the two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    import gguf

    s, source = Shape.read(request["model"]), Checkpoint(request["model"])
    path = Path(request["path"])
    path.mkdir(parents=True, exist_ok=True)
    kind = gguf.GGMLQuantizationType[request.get("kind", "Q4_0")]
    file = path / f"{kind.name.lower()}.gguf"
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=False)
    writer.add_block_count(s.layers)
    writer.add_context_length(source.positions)
    if s.experts:
        writer.add_expert_count(s.experts)
        writer.add_expert_used_count(s.chosen)
    writer.add_embedding_length(s.hidden)
    writer.add_feed_forward_length(s.intermediate)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_key_length(s.head)
    writer.add_value_length(s.head)
    writer.add_rope_dimension_count(s.head)
    writer.add_rope_freq_base(s.theta)
    writer.add_layer_norm_rms_eps(s.eps)
    writer.add_vocab_size(s.vocabulary)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.name}"])
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, weight: np.ndarray) -> None:
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)

    matrix("token_embd", source.array("model.embed_tokens.weight"))
    for i in range(s.layers):
        here, block = f"model.layers.{i}", f"blk.{i}"
        matrix(f"{block}.attn_q", permute(source.array(f"{here}.self_attn.q_proj.weight"), s.heads))
        matrix(f"{block}.attn_k", permute(source.array(f"{here}.self_attn.k_proj.weight"), s.kv_heads))
        matrix(f"{block}.attn_v", source.array(f"{here}.self_attn.v_proj.weight"))
        matrix(f"{block}.attn_output", source.array(f"{here}.self_attn.o_proj.weight"))
        for part, old in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
            if s.experts:
                names = (f"{here}.block_sparse_moe.experts.{e}.{old}.weight" for e in range(s.experts))
                matrix(f"{block}.ffn_{part}_exps", np.stack([source.array(name) for name in names]))
            else:
                matrix(f"{block}.ffn_{part}", source.array(f"{here}.mlp.{part}_proj.weight"))
        if s.experts:
            writer.add_tensor(f"{block}.ffn_gate_inp.weight", source.array(f"{here}.block_sparse_moe.gate.weight"))
        writer.add_tensor(f"{block}.attn_norm.weight", source.array(f"{here}.input_layernorm.weight"))
        writer.add_tensor(f"{block}.ffn_norm.weight", source.array(f"{here}.post_attention_layernorm.weight"))
    writer.add_tensor("output_norm.weight", source.array("model.norm.weight"))
    matrix("output", source.array("lm_head.weight"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"bytes": file.stat().st_size}


class Decoder(CachedEngine):
    """Defaults of llama.cpp (memory map, flash attention, repacking), `n_batch` 512, a cache of float16."""

    def __init__(self, request: dict[str, Any]) -> None:
        llama.llama_backend_init()
        self.vocabulary = Shape.read(request["model"]).vocabulary
        file = str(Path(request["path"]) / request.get("file", FILE)).encode()
        self.model = llama.llama_model_load_from_file(file, llama.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {file.decode()}")
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 2 * request["context"], BATCH, BATCH  # room for `repeat`
        params.n_threads = params.n_threads_batch = request["threads"]
        params.n_seq_max, params.kv_unified = 2, True  # the second is for `repeat`
        self.context = llama.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")

    def run(self, ids: Sequence[int]) -> np.ndarray:
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            array = (llama.llama_token * len(part))(*part)
            code = llama.llama_decode(self.context, llama.llama_batch_get_one(array, len(part)))
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
        return np.ctypeslib.as_array(llama.llama_get_logits_ith(self.context, -1), (self.vocabulary,)).copy()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        return self.run(ids)

    def repeat(self, length: int) -> None:
        """Cells of the sequence are copied behind it until it is `length` long; llama.cpp turns the copied keys to their places."""
        memory = llama.llama_get_memory(self.context)
        while (have := llama.llama_memory_seq_pos_max(memory, 0) + 1) < length:
            size = llama.llama_state_seq_get_size(self.context, 0)
            state = (ctypes.c_uint8 * size)()
            llama.llama_state_seq_get_data(self.context, state, size, 0)
            if not llama.llama_state_seq_set_data(self.context, state, size, 1):
                raise RuntimeError("llama.cpp cannot copy a sequence")
            llama.llama_memory_seq_rm(memory, 1, length - have, -1)
            llama.llama_memory_seq_add(memory, 1, 0, -1, have)
            llama.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            llama.llama_memory_seq_rm(memory, 1, -1, -1)


def load(request: dict[str, Any]) -> Engine:
    return Decoder(request)


def quantize(request: dict[str, Any]) -> dict[str, Any]:
    """A GGUF of `original` in one of llama.cpp's mixtures, embedding and output aside."""
    settings = llama.llama_model_quantize_default_params()
    settings.nthread = request["threads"]
    settings.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{request['type']}")
    settings.token_embedding_type = settings.output_tensor_type = BF16
    importance = np.load(request["importance"])
    entries = (llama.llama_model_imatrix_data * (len(importance.files) + 1))()
    kept = []
    for entry, name in zip(entries, importance.files, strict=False):
        kept.append(np.ascontiguousarray(importance[name], np.float32))
        entry.name, entry.size = name.encode(), kept[-1].size
        entry.data = kept[-1].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    settings.imatrix = entries
    original, output = str(request["original"]).encode(), str(request["output"]).encode()
    if code := llama.llama_model_quantize(original, output, ctypes.byref(settings)):
        raise RuntimeError(f"llama_model_quantize to {request['type']} gave {code}")
    return {"bytes": Path(request["output"]).stat().st_size}


def enlarged(request: dict[str, Any]) -> dict[str, Any]:
    """`gguf_blocks.enlarge`, with ggml's sizes."""
    ggml = Ggml()

    def row_size(kind: int, values: int) -> int:
        return int(ggml("ggml_row_size", kind, ctypes.c_int64(values), result=ctypes.c_size_t))

    return enlarge(request, row_size, lambda kind: int(ggml("ggml_blck_size", kind, result=ctypes.c_int64)))


def quality(request: dict[str, Any]) -> dict[str, Any]:
    """KL divergence and perplexity of a file."""
    decoder = Decoder(request)

    def forget() -> None:
        llama.llama_memory_clear(llama.llama_get_memory(decoder.context), True)

    return llama_divergence(request, llama, decoder, forget)


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The few functions of ggml's C interface that one product needs."""

    def __init__(self) -> None:
        folder = Path(llama.__file__).parent / "lib"
        self.libraries = [ctypes.CDLL(str(folder / f"libggml{part}.so")) for part in ("-base", "-cpu", "")]

    def __call__(self, name: str, *arguments: Any, result: Any = ctypes.c_void_p) -> Any:
        for library in self.libraries:
            if hasattr(library, name):
                function = getattr(library, name)
                function.restype = result
                return function(*arguments)
        raise RuntimeError(f"ggml has no {name}")


def pointer(value: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(value)


def repack_buffer(ggml: Ggml) -> int | None:
    """The buffer type that lays int4 weights out anew for this CPU, as llama.cpp uses it for its models."""
    registry = ggml("ggml_backend_cpu_reg")
    device = ggml("ggml_backend_reg_dev_get", pointer(registry), ctypes.c_size_t(0))
    address = ggml("ggml_backend_reg_get_proc_address", pointer(registry), b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    kinds = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(device)
    names = []
    for kind in kinds:
        if not kind:
            break
        names.append(ggml("ggml_backend_buft_name", pointer(kind), result=ctypes.c_char_p).decode())
        if "REPACK" in names[-1]:
            return int(kind)
    return None


def products(request: dict[str, Any], repacked: bool) -> dict[str, Any]:
    """Time `copies` products in one graph."""
    import gguf

    ggml = Ggml()
    rows, columns = request["rows"], request["columns"]
    size = ctypes.c_int64
    kind = repack_buffer(ggml) if repacked else ggml("ggml_backend_cpu_buffer_type")
    if not kind:
        return {"error": "no repacked layout for this CPU"}
    backend = ggml("ggml_backend_cpu_init")
    ggml("ggml_backend_cpu_set_n_threads", pointer(backend), request["threads"], result=None)
    memory = InitParams(1 << 20, None, True)
    weights, work = (pointer(ggml("ggml_init", memory)) for _ in range(2))
    matrices = [
        pointer(ggml("ggml_new_tensor_2d", weights, Q4_0, size(columns), size(rows))) for _ in range(request["copies"])
    ]
    if not ggml("ggml_backend_alloc_ctx_tensors_from_buft", weights, pointer(kind)):
        return {"error": "ggml cannot allocate the weights"}
    x = pointer(ggml("ggml_new_tensor_2d", work, F32, size(columns), size(1)))
    graph = pointer(ggml("ggml_new_graph", work))
    outputs = [pointer(ggml("ggml_mul_mat", work, matrix, x)) for matrix in matrices]
    for output in outputs:
        ggml("ggml_build_forward_expand", graph, output, result=None)
    ggml("ggml_backend_alloc_ctx_tensors", work, pointer(backend))
    vector = np.random.default_rng(1).standard_normal(columns, dtype=np.float32)
    put = "ggml_backend_tensor_set"
    zero, word = ctypes.c_size_t(0), ctypes.c_size_t
    ggml(put, x, vector.ctypes.data_as(ctypes.c_void_p), zero, word(vector.nbytes), result=None)
    exact = None
    for matrix, (codes, scale) in zip(matrices, matvec_data(request), strict=True):
        dense = dequantize(codes, scale)
        data = np.ascontiguousarray(gguf.quants.quantize(dense, gguf.GGMLQuantizationType.Q4_0))
        ggml(put, matrix, data.ctypes.data_as(ctypes.c_void_p), zero, word(data.nbytes), result=None)
        if exact is None:
            exact = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_0) @ vector

    def run() -> None:
        if ggml("ggml_backend_graph_compute", pointer(backend), graph, result=ctypes.c_int):
            raise RuntimeError("ggml_backend_graph_compute failed")

    timed = time_matvec(request, run, len(matrices), rows * columns // 32 * 18)
    got = np.empty(rows, np.float32)
    ggml(
        "ggml_backend_tensor_get", outputs[0], got.ctypes.data_as(ctypes.c_void_p), zero, word(got.nbytes), result=None
    )
    assert exact is not None
    return {**timed, "relative_error": float(np.linalg.norm(got - exact) / np.linalg.norm(exact))}


def matvec(request: dict[str, Any]) -> dict[str, Any]:
    """The better of the two layouts; the other one is kept beside it."""
    found = {name: products(request, name == "repacked") for name in ("plain", "repacked")}
    timed = {name: result for name, result in found.items() if "error" not in result}
    best = min(timed, key=lambda name: timed[name]["seconds"])
    return {**timed[best], "layout": best, "layouts": found}


if __name__ == "__main__":
    actions = {"prepare": prepare, "measure": lambda request: measure(request, load), "matvec": matvec}
    actions |= {"quantize": quantize, "enlarge": enlarged, "quality": quality}
    actions["depths"] = lambda request: measure_depths(request, load)
    main(actions, "llama-cpp-python", "gguf")
