"""llama.cpp through llama-cpp-python's low-level bindings: logits of every position, greedy tokens, token ids of a text.

The cache of keys and values is float32 and flash attention off, so that what differs from the artifact is what llama.cpp makes
of the weights. On a CPU it rounds the input of every product with a quantized matrix to 8 bits (`Q8_0`, `Q8_1`), of one with a
BF16 or F16 matrix to that type; with F32 matrices it computes in float32.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from runtime.errors import CompressError


def version() -> str:
    """`llama-cpp-python 0.3.36`."""
    import llama_cpp

    return f"llama-cpp-python {llama_cpp.__version__}"


class Model:
    """A loaded file. Use as a context manager.

    Args:
        path: the .gguf file.
        context: tokens that fit.
        threads: of the CPU (None: as many as torch takes); nothing is put on a GPU.
    """

    def __init__(self, path: Path, context: int, threads: int | None = None) -> None:
        import llama_cpp

        self._c: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self._model:
            raise CompressError(f"llama.cpp does not load {path.name}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = asked.n_batch = asked.n_ubatch = context
        asked.n_threads = asked.n_threads_batch = threads or torch.get_num_threads()
        asked.type_k = asked.type_v = llama_cpp.GGML_TYPE_F32
        asked.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, asked)
        if not self._context:
            llama_cpp.llama_model_free(self._model)
            raise CompressError(f"llama.cpp makes no context of {context} tokens for {path.name}")
        self._batch = llama_cpp.llama_batch_init(context, 0, 1)
        self._limit = context

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *error: object) -> None:
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Float32 `[batch, seq, vocab]` of ids `[batch, seq]`."""
        return torch.stack([self._feed(row, 0, every=True) for row in ids.tolist()])

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """`count` greedy tokens after each prompt, through the cache."""
        answers = []
        for prompt in prompts:
            answer = [int(self._feed(prompt, 0)[-1].argmax())]
            while len(answer) < count:
                last = self._feed(answer[-1:], len(prompt) + len(answer) - 1)
                answer.append(int(last[-1].argmax()))
            answers.append(answer)
        return answers

    def tokenize(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids; special tokens in the text are taken for such."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (self._c.llama_token * room)()
        count = self._c.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, True)
        if count < 0:
            raise CompressError("llama.cpp could not tokenize the test text")
        return list(ids[:count])

    def _feed(self, ids: list[int], start: int, every: bool = False) -> torch.Tensor:
        """Logits `[n, vocab]` of every new position, or `[1, vocab]` of the last one; a new sequence begins at 0."""
        if start == 0:
            self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        if start + len(ids) > self._limit:
            raise CompressError(f"{start + len(ids)} tokens do not fit into a context of {self._limit}")
        batch = self._batch
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == len(ids) - 1
        code = self._c.llama_decode(self._context, batch)
        if code != 0:
            raise CompressError(f"llama.cpp failed on {len(ids)} tokens (llama_decode gave {code})")
        wanted = range(len(ids)) if every else [len(ids) - 1]
        out = torch.empty(len(wanted), self.vocabulary)
        for row, i in enumerate(wanted):
            address = self._c.llama_get_logits_ith(self._context, i)
            ctypes.memmove(out[row].data_ptr(), address, self.vocabulary * 4)
        return out
