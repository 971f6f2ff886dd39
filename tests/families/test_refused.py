"""What this runtime could not run, or what cannot go block by block, is refused before anything is computed: by `plan` and by `apply`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_models import Family

import compress
from compress.recipe import load
from compress.run.plan import make_plan
from runtime.errors import RequestError

W4 = {"quantize": {"method": "gptq", "scheme": "W4A16", "group_size": 32}}
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2}
_USUAL = {**_SMALL, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA = {**_SMALL, "state_size": 8, "time_step_rank": 32}
_NO_CACHE = r"{} takes no KV cache .*; this runtime cannot decode it"
_SHARED = r"the layers of {} share weights \(.*\): layers that share their weights cannot be compressed block by block"
REFUSED = [
    (Family("mamba", _MAMBA), _NO_CACHE.format("MambaForCausalLM")),
    (Family("falcon_mamba", _MAMBA), _NO_CACHE.format("FalconMambaForCausalLM")),
    (
        Family("mamba2", {**_SMALL, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}),
        _NO_CACHE.format("Mamba2ForCausalLM"),
    ),
    (Family("xlstm", {**_SMALL, "num_heads": 4, "embedding_dim": 64}), "xLSTMForCausalLM"),
    (
        Family("rwkv", {**_SMALL, "attention_hidden_size": 64, "context_length": 128}),
        _NO_CACHE.format("RwkvForCausalLM"),
    ),
    (
        Family("openai-gpt", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
        _NO_CACHE.format("OpenAIGPTLMHeadModel"),
    ),
    (
        Family(
            "zamba",
            {
                **_USUAL,
                "num_hidden_layers": 6,
                "attn_layer_period": 3,
                "attn_layer_offset": 2,
                "mamba_d_state": 8,
                "mamba_dt_rank": 8,
                "n_mamba_heads": 2,
                "attention_head_dim": 32,
                "use_mamba_kernels": False,
            },
        ),
        _SHARED.format("ZambaForCausalLM"),
    ),
    (
        Family(
            "zamba2",
            {
                **_USUAL,
                "num_hidden_layers": 6,
                "mamba_d_state": 8,
                "mamba_headdim": 16,
                "n_mamba_heads": 8,
                "chunk_size": 8,
                "adapter_rank": 32,
                "hybrid_layer_ids": [2, 5],
                "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"],
                "use_mamba_kernels": False,
            },
        ),
        _SHARED.format("Zamba2ForCausalLM"),
    ),
    (
        Family(
            "minimax",
            {
                **_USUAL,
                "head_dim": 16,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": ["linear_attention", "full_attention"],
                "block_size": 8,
            },
        ),
        "MiniMaxForCausalLM: MiniMax uses cache of its own",
    ),
    (
        Family(
            "pegasus_x",
            {
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 96,
                "decoder_ffn_dim": 96,
                "decoder_start_token_id": 256,
            },
            model="PegasusXForConditionalGeneration",
            kind="encoder-decoder",
        ),
        r"PegasusXForConditionalGeneration \(PegasusXEncoderLayer\)",
    ),
]


@pytest.mark.parametrize(("family", "said"), REFUSED, ids=[family.name for family, _ in REFUSED])
def test_what_cannot_be_run_is_refused_at_once(family: Family, said: str, tmp_path: Path) -> None:
    path, text, output = family.write(tmp_path / "model"), tmp_path / "text.txt", tmp_path / "out"
    text.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(200)))
    calibration = {"data": str(text), "samples": 8, "sequence_length": 32, "batch_size": 4}
    recipe: dict[str, Any] = {"name": "test", "model": str(path), "calibration": calibration, "stages": [W4]}
    with pytest.raises(RequestError, match=said):
        make_plan(load(recipe), output)
    with pytest.raises(RequestError, match=said):
        compress.apply(recipe, output=output, quiet=True)
    assert not output.exists()
