"""What the builders need to know of a decoder besides its weights: plain values, so that they can lie in a bundle's build.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from runtime.engines import llama_structure

if TYPE_CHECKING:
    from export.source import Source

ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True)
class DecoderModel:
    """A decoder's facts.

    Attributes:
        layers, heads, kv_heads, head_dim, hidden, vocabulary: its sizes.
        context: most positions; None when the configuration has no limit.
        unknown: why the network cannot be made of TensorRT's own layers; None when it can. The rest is only there then:
        eps: of the norms. scale: of attention. rotation: inverse frequencies, half the rotated width of them.
        rotation_scale: factor of cosines and sines. norms: queries and keys are normalized (`q_norm`, `k_norm`).
        tied: the output layer is the embedding.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    context: int | None
    unknown: str | None = None
    eps: float = 0.0
    scale: float = 1.0
    rotation: tuple[float, ...] = ()
    rotation_scale: float = 1.0
    norms: bool = False
    tied: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DecoderModel:
        """The inverse of `as_dict`, from JSON too."""
        return cls(**{**values, "rotation": tuple(values["rotation"])})


def read_model(source: Source) -> DecoderModel:
    """The facts of an artifact's model, from its configuration and skeleton."""
    config: Any = source.config.get_text_config()
    model: Any = source.skeleton
    heads = int(config.num_attention_heads)
    sizes: dict[str, Any] = {
        "layers": int(config.num_hidden_layers),
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        "hidden": int(config.hidden_size),
        "vocabulary": int(model.get_output_embeddings().out_features),
        "context": getattr(config, "max_position_embeddings", None),
    }
    unknown = llama_structure.why_not(model) or _windowed(model, config)
    if unknown is not None:
        return DecoderModel(**sizes, unknown=unknown)
    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    return DecoderModel(
        **sizes,
        eps=float(config.rms_norm_eps),
        scale=float(attention.scaling),
        rotation=tuple(rotary.inv_freq.double().tolist()),
        rotation_scale=float(getattr(rotary, "attention_scaling", 1.0)),
        norms=hasattr(attention, "q_norm"),
        tied="lm_head.weight" in source.tied,
    )


def _windowed(model: Any, config: Any) -> str | None:
    windows = {llama_structure.window(layer, config) for layer in model.model.layers} - {0}
    return f"its attention sees a window of {windows.pop()} positions only" if windows else None
