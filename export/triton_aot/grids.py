"""How many programs each kernel is launched with, as an expression of its arguments, for people who read `index.json`.

`rows` are the rows of activations (tokens, sequences); `tiles`, `heads` are what the kernel's file calls so.
"""

from __future__ import annotations

RULES = {
    "codes._sum_parts": "cdiv(MN, BLOCK)",
    "few_rows.few_rows_kernel": "cdiv(N, BLOCK_N), SPLIT_K, cdiv(M, BLOCK_M)",
    "fused.rms_norm_kernel": "rows",
    "fused.rotary_kernel": "rows, cdiv(HEADS, BLOCK_H)",
    "fused.swiglu_kernel": "rows, cdiv(SIZE, BLOCK)",
    "many_rows.dequantize_kernel": "cdiv(N, BLOCK_N), cdiv(K, 512 // FIELD)",
    "many_rows.many_rows_kernel": "cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), SPLIT_K",
    "matvec.matvec_kernel": "cdiv(N, 2 * BLOCK_N), SPLIT_K",
    "paged_attention.join_kernel": "rows, heads",
    "paged_attention.split_kernel": "rows, heads // GROUP, SPLITS",
    "rotary_store.rotary_store_kernel": "rows, HEADS + 2 * KV_HEADS",
    "sparse24_w4.expand_kernel": "cdiv(N, BLOCK_N), cdiv(K, 256)",
    "sparse24_w4.sparse24_kernel": "cdiv(N, 2 * BLOCK_N), SPLIT_K, rows",
    "w8a8.quantize_kernel": "rows",
    "w8a8.w8a8_kernel": "cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N), SPLIT_K",
}
