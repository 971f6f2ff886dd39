"""Engine of encoder-decoders: a transformers model whose compressed layers keep their weights packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from runtime.engines.torch.encoder import position_limit
from runtime.engines.torch.engine import ModuleEngine, tensor_bytes
from runtime.errors import RequestError
from runtime.modeling.cache_argument import cache_argument
from runtime.modeling.skeleton import reads_features

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TorchSeq2SeqEngine(ModuleEngine):
    """Runs a transformers encoder-decoder; see `runtime.engines.base.Seq2SeqEngine`."""

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        super().__init__(module, device)
        self._encoder: Any = module.get_encoder()
        head: Any = module.get_output_embeddings()
        self.vocab_size = int(head.out_features)
        self.features = reads_features(module)
        self.context_length = None if self.features else position_limit(module)
        self.decoder_context_length = target_limit(module)

    @torch.inference_mode()
    def encode(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Encoder states of token ids or audio features; `RequestError` where features do not fit the encoder's window."""
        if self.features:
            try:
                with self.products():
                    return self._encoder(input_ids.to(self.module.dtype)).last_hidden_state
            except ValueError as error:
                # Each family has a window of its own, of which only its encoder knows.
                raise RequestError(f"features of shape {list(input_ids.shape[1:])} do not fit: {error}") from error
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        with self.products():
            return self._encoder(input_ids=input_ids, attention_mask=mask).last_hidden_state

    def new_cache(self) -> Any:
        """An empty decoder cache."""
        from transformers import DynamicCache, EncoderDecoderCache

        # Without a config: it would say how many layers one of the stacks has, and the two may differ.
        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    @torch.inference_mode()
    def decode(
        self,
        decoder_input_ids: torch.Tensor,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Decoder logits for the new tokens, or after the last of them only; the cache is extended."""
        with self.products():
            logits = self.module(
                decoder_input_ids=decoder_input_ids,
                encoder_outputs=encoder_output(states),
                attention_mask=attention_mask,
                use_cache=cache is not None,
                **{cache_argument(self.module): cache},
            ).logits
        return (logits[:, -1:] if last_only else logits).float()

    def cache_bytes(self, cache: Any) -> int:
        """Memory of the cache, bytes."""
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        return tensor_bytes([v for layer in layers for v in vars(layer).values() if isinstance(v, torch.Tensor)])


def encoder_output(states: torch.Tensor) -> Any:
    """What transformers' models take as the output of their encoder, all positions of which are valid: states `[b, s, hidden]`."""
    from transformers.modeling_outputs import BaseModelOutput

    output: Any = BaseModelOutput(last_hidden_state=states)  # type: ignore[arg-type]
    output.attention_mask = None  # some encoders of speech say with their output which positions are (Canary)
    output.router_logits = None  # mixtures are asked what chose their experts, for training (Switch)
    return output


def target_limit(module: PreTrainedModel) -> int | None:
    """Most tokens of an output of an encoder-decoder, the start token included; None where there is no limit."""
    limit = getattr(module.config, "max_target_positions", None)
    return limit if isinstance(limit, int) else position_limit(module)
