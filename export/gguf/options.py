"""Options of `--target gguf`."""

from __future__ import annotations

from typing import Literal

from export.target import Options


class GgufOptions(Options):
    """`--set NAME=VALUE`."""

    dense: Literal["auto", "bf16", "f16", "f32"] = "auto"
    """What matrices are stored in that no block type holds (not compressed, float8, rows that are no multiple of 32); auto: the
    artifact's own dtype. Norms and biases are always float32, which is what llama.cpp computes them in."""

    asymmetric: Literal["auto", "q4_1", "q5_0"] = "auto"
    """Asymmetric int4. q5_0 is exact, 5.5 bits a weight; q4_1 has 5 bits and rounds each group's minimum to fp16 where fp16 does
    not hold it (by less than one percent of a step; the loss is reported); auto: q4_1 where it is exact, else q5_0."""

    tokenizer: Literal["auto", "none"] = "auto"
    """none: write no tokenizer (`no_vocab`): prompts and answers are token ids then."""
