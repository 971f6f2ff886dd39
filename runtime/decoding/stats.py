"""Numbers about one call of generate or stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class GenerationStats:
    """Counts and wall-clock seconds.

    Attributes:
        sequences: prompts in the call.
        prompt_tokens, new_tokens: sums over the prompts.
        first_tokens: new tokens that came out of the prefill (one a sequence).
        prefill_seconds: until the first tokens were chosen. decode_seconds: everything after.
        cache_bytes: the KV cache at its largest; it is freed when the call ends.
    """

    sequences: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    cache_bytes: int = 0
    finish_reasons: tuple[str, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first ones over `decode_seconds`; 0 when there were none."""
        return _rate(self.new_tokens - self.first_tokens, self.decode_seconds)

    @property
    def prefill_tokens_per_second(self) -> float:
        return _rate(self.prompt_tokens, self.prefill_seconds)

    def as_dict(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
            "prefill_seconds": self.prefill_seconds,
            "decode_seconds": self.decode_seconds,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "sequences": self.sequences,
            "finish_reasons": list(self.finish_reasons),
            "cache_bytes": self.cache_bytes,
        }


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0
