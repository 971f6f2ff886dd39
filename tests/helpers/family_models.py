"""Tiny random checkpoints, one of every family, built from a config alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from checkpoints import VOCABULARY, byte_tokenizer

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
_USUAL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, **_ATTENTION}
_ROUTED = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {**_USUAL, "head_dim": 16, "sliding_window": 8}
_TEXT_TO_TEXT = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 256,
}
_SPEECH = {**_TEXT_TO_TEXT, "max_target_positions": 40, "bos_token_id": 256}


@dataclass(frozen=True)
class Family:
    """How a tiny model of a family is made.

    Attributes:
        name: of the test. model_type: transformers' name of its configuration.
        settings: of that configuration. build: makes a config where `settings` cannot say it.
        model: class (of transformers) if it is not what `AutoModelForCausalLM` gives.
        kept: last names of linear layers that are never compressed: heads, and what chooses experts.
        extractor: class (of transformers) and settings of what makes features of sounds, of a model that hears.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    model: str = ""
    dtype: torch.dtype = torch.float32
    kind: str = "decoder"
    kept: tuple[str, ...] = ("lm_head", "embed_out")
    build: Callable[[], Any] | None = None
    extractor: tuple[str, dict[str, Any]] | None = None

    def config(self) -> Any:
        """Its configuration."""
        from transformers import AutoConfig

        if self.build is not None:
            return self.build()
        given = {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": 256,
            "pad_token_id": 256,
        }
        return AutoConfig.for_model(self.model_type or self.name, **{**given, **self.settings})

    def write(self, path: Path) -> Path:
        """A checkpoint with values that matter everywhere: biases and norms too."""
        import transformers

        torch.manual_seed(len(self.name))
        config = self.config()
        if self.model:
            model = getattr(transformers, self.model)._from_config(config, dtype=self.dtype)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.05)
        model.save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
        if self.extractor is not None:
            name, settings = self.extractor
            getattr(transformers, name)(**settings).save_pretrained(path)
        return path


def _qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {
        **_USUAL,
        "vocab_size": VOCABULARY + 4,
        "max_position_embeddings": 128,
        "eos_token_id": 256,
        "bos_token_id": None,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]},
        "rope_theta": 10000.0,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "fullatt_block_indexes": [1],
        "window_size": 16,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=VOCABULARY,
        vision_end_token_id=VOCABULARY + 1,
        image_token_id=VOCABULARY + 2,
        video_token_id=VOCABULARY + 3,
    )


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig

    text = {
        **_USUAL,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "vocab_size": VOCABULARY + 4,
        "max_position_embeddings": 128,
        "eos_token_id": 256,
        "bos_token_id": None,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=VOCABULARY,
        vision_end_token_id=VOCABULARY + 1,
        image_token_id=VOCABULARY + 2,
        video_token_id=VOCABULARY + 3,
    )


def _llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    text = LlamaConfig(
        **_USUAL, vocab_size=VOCABULARY + 1, max_position_embeddings=128, bos_token_id=None, eos_token_id=256
    )
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    return LlavaConfig(text_config=text, vision_config=vision, image_token_id=VOCABULARY)


FAMILIES = [
    Family("llama", _USUAL),
    Family("mistral", {**_USUAL, "sliding_window": 8}),
    Family("qwen2", _USUAL),
    Family("qwen3", {**_USUAL, "head_dim": 16}),
    Family("gemma2", _GEMMA),
    Family("gemma3", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}, "gemma3_text"),
    Family("phi3", _USUAL),
    Family("olmo", _USUAL),  # norms without weights
    Family(
        "opt",
        {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    ),
    Family("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    Family("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    Family("gptj", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 8}),
    Family("gpt_neox", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}),
    Family("falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    Family("mpt", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}),
    Family("starcoder2", {**_USUAL, "sliding_window": 8}),
    Family("glm4", {**_USUAL, "head_dim": 16}),
    Family("mixtral", {**_USUAL, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    Family("granitemoe", {**_USUAL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("qwen3_moe", {**_USUAL, **_ROUTED, "head_dim": 16}),
    Family(
        "deepseek_v3",
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    Family(
        "deepseek_v32",  # looks at the dtype of a layer's weight as it runs
        {
            **_USUAL,
            **_ROUTED,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "head_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "index_topk": 8,
        },
    ),
    Family(
        "gpt_oss", {**_USUAL, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}
    ),
    Family(
        "qwen3_next",
        {
            **_USUAL,
            **_ROUTED,
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        kept=("lm_head", "shared_expert_gate"),
    ),
    Family(
        "jamba",
        {
            **_USUAL,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 32,
            "use_mamba_kernels": False,
        },
        kept=("lm_head", "router", "dt_proj"),
    ),
    Family(
        "kimi_linear",
        {
            **_USUAL,
            **_ROUTED,
            "num_local_experts": 4,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    Family(
        "falcon_h1",
        {
            **_USUAL,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0],
        },
    ),
    Family(
        "bert",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        model="BertModel",
        kind="encoder",
        kept=(),
    ),
    Family(
        "big_bird",  # swaps the module around its layers when it reads short rows
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        model="BigBirdModel",
        kind="encoder",
        kept=(),
    ),
    Family(
        "nomic_bert",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
        model="NomicBertModel",
        kind="encoder",
        kept=(),
    ),
    Family(
        "t5",
        {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 256},
        model="T5ForConditionalGeneration",
        kind="encoder-decoder",
    ),
    Family(
        "switch_transformers",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "num_experts": 1,  # an expert that no token of the first row is sent to stays as it is
            "expert_capacity": 64,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "decoder_start_token_id": 256,
        },
        model="SwitchTransformersForConditionalGeneration",
        kind="encoder-decoder",
        kept=("lm_head",),
    ),
    Family(
        "marian",
        {**_TEXT_TO_TEXT, "bos_token_id": 256, "forced_eos_token_id": None},
        model="MarianMTModel",
        kind="encoder-decoder",
    ),
    Family(
        "whisper",
        {**_SPEECH, "num_mel_bins": 8, "max_source_positions": 20, "begin_suppress_tokens": []},
        model="WhisperForConditionalGeneration",
        kind="encoder-decoder",
        kept=("proj_out",),
        extractor=("WhisperFeatureExtractor", {"feature_size": 8, "hop_length": 400, "chunk_length": 1}),
    ),
    Family(
        "speech_to_text",
        {
            **_SPEECH,
            "input_feat_per_channel": 16,
            "conv_channels": 32,
            "max_source_positions": 400,
            "max_target_positions": 300,
        },
        model="Speech2TextForConditionalGeneration",
        kind="encoder-decoder",
        extractor=("Speech2TextFeatureExtractor", {"feature_size": 16, "num_mel_bins": 16}),
    ),
    Family("qwen2_5_vl", build=_qwen2_5_vl, model="Qwen2_5_VLForConditionalGeneration"),
    Family("qwen3_vl", build=_qwen3_vl, model="Qwen3VLForConditionalGeneration"),
    Family("llava", build=_llava, model="LlavaForConditionalGeneration"),
]
