"""Tiny random encoders and encoder-decoders with a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 260


def byte_tokenizer(special: bool = True) -> Any:
    """One token a byte; with `special` texts are framed as [CLS] text [SEP], as BERT's are, else they end with </s>, as T5's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {"[PAD]": 256, "[CLS]": 257, "[SEP]": 258, "</s>": 259}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    frame = "[CLS] $A [SEP]" if special else "$A </s>"
    backend.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[("[CLS]", 257), ("[SEP]", 258), ("</s>", 259)]
    )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if special else {"eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", **names)


def bert(name: str = "BertModel", **changes: Any) -> Any:
    """A random BERT (hidden 64, 2 layers), in float32 and eval mode; `name` is the class."""
    import transformers

    settings: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.BertConfig(**{**settings, **changes})).eval()
    with torch.no_grad():  # what training gives them: norms and biases that are not 1 and 0
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def t5(**changes: Any) -> Any:
    """A random T5 (width 64, 2 + 2 layers), in float32 and eval mode."""
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
        "decoder_start_token_id": 256, "pad_token_id": 256, "eos_token_id": 259,
    }  # fmt: skip
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**{**settings, **changes})).eval()
    with torch.no_grad():  # the usual initial weights are so small that all outputs look alike
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 4.0 if "relative" in key else 1.5 / parameter.shape[1] ** 0.5)
    return model


def save(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model and its tokenizer."""
    model.to(dtype).save_pretrained(path)
    byte_tokenizer(special=not model.config.is_encoder_decoder).save_pretrained(path)
    return path
