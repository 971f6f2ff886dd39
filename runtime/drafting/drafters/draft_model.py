"""Draft model read from its directory: its engine, its head cut down to the tokens it proposes, the target it was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import read_json
from runtime.config.settings import ConfigError, read
from runtime.drafting.config.target import UnfitError, other_target
from runtime.errors import ArtifactError, RequestError

DRAFT = "draft.json"


@dataclass
class DraftModel:
    """A loaded draft.

    Attributes:
        engine: computes it.
        kept: int64 `[k]`, the target's id of each of its logits; None: they are the same.
        facts: the content of draft.json; empty without one.
        cache_bytes: that its keys and values may take; None: any number.
        weight_bytes: as held in memory.
        context_length: tokens of a sequence that it can read; None: any number.
        page_size: positions that its cache grows by. position_bytes: keys and values of one.
    """

    engine: Any
    kept: torch.Tensor | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    cache_bytes: int | None = None

    @property
    def weight_bytes(self) -> int:
        """Memory of the draft's packed weights, bytes."""
        return int(self.engine.weight_bytes)

    @property
    def context_length(self) -> int | None:
        """Most positions that the draft was made for; None without a limit."""
        found: int | None = self.engine.context_length
        return found

    @property
    def page_size(self) -> int:
        """Positions of a cache page; 1 where the engine has no pages."""
        return int(getattr(self.engine, "page_size", 1))

    @property
    def position_bytes(self) -> int:
        """Memory of one position of the draft cache, all layers together, bytes."""
        if hasattr(self.engine, "page_bytes"):
            return int(self.engine.page_bytes // self.engine.page_size)
        from runtime.engines.streaming.plan import position_bytes

        return max(1, position_bytes(self.engine.module.config, self.engine.module.dtype))


def load_draft(path: Path, target: Artifact, device: torch.device, trust_remote_code: bool = False) -> DraftModel:
    """Read a draft of a target.

    Args:
        path: a Hugging Face checkpoint or an artifact, maybe with a draft.json.
        target: what it shall propose for.
        device: of the target.

    Raises:
        RequestError: it is a draft of another target, or has another vocabulary. UnfitError: its cache takes no tokens back.
        ArtifactError: it cannot be read.
    """
    from runtime.engines.choose import fused_engine
    from runtime.engines.torch.engine import Blueprint

    artifact, facts = Artifact(path, trust_remote_code), draft_facts(path)
    check_target(facts, artifact, target)
    blueprint = Blueprint(artifact, device, "auto", None, trust_remote_code)
    if blueprint.kind != "decoder":
        raise RequestError(f"drafter: {path} is an {blueprint.kind}; a draft is a causal language model")
    engine = blueprint.build()
    kept = _kept(path, facts)
    if kept is not None:
        _trim(engine.module, kept, path)
    fused = fused_engine(engine)
    reason = why_not_back(fused)
    if reason is not None:
        raise UnfitError(("model",), f"{path} cannot draft on {fused.description}: it {reason}")
    return DraftModel(fused, kept, facts)


def draft_facts(path: Path) -> dict[str, Any]:
    """The content of a directory's draft.json; empty without one."""
    return read_json(path / DRAFT) if (path / DRAFT).is_file() else {}


def read_fact(directory: Path, facts: Mapping[str, Any], kind: Any, *path: str) -> Any:
    """A value of a directory's draft.json, of an annotated type; ArtifactError where it is none such."""
    value: Any = facts
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    try:
        return read(kind, value, path)
    except ConfigError as error:
        raise ArtifactError(f"{directory / DRAFT}: {error}") from None


def why_not_back(engine: Any) -> str | None:
    """Why an engine's cache takes no tokens back, which a draft does after every step; None: it does."""
    if hasattr(engine, "make_memory"):  # pages keep every token of every layer
        return None
    from transformers.cache_utils import DynamicCache, DynamicLayer

    config = engine.module.config.get_text_config(decoder=True)
    named = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and not named:
        named = {"chunked_attention"}
    if named - {"full_attention"}:
        kinds = ", ".join(sorted(named - {"full_attention"}))
        return f"has layers of {kinds}, whose caches forget tokens and take none back"
    for layer in DynamicCache(config=config).layers:
        if type(layer) is not DynamicLayer:
            return f"caches with {type(layer).__name__}, which forgets tokens and takes none back"
    return None


def check_target(facts: Mapping[str, Any], draft: Artifact, target: Artifact) -> None:
    """RequestError where a draft says that it is another target's, or where its tokens mean something else."""
    own = facts.get("target")
    if own is not None and own != target.checkpoint.fingerprint():
        raise other_target(draft.path, own, target)
    mine, theirs = _vocabulary(draft), _vocabulary(target)
    if mine is not None and theirs is not None:
        if mine != theirs:
            odd = sorted(set(mine.items()) ^ set(theirs.items()), key=lambda item: item[1])[0]
            raise RequestError(
                f"drafter: {draft.path} has another vocabulary than {target.path} ({len(mine)} and {len(theirs)} tokens; {odd[0]!r} "
                f"with id {odd[1]} is only in one): a draft must have its target's"
            )
        return
    sizes = [_text(each.config).get("vocab_size") for each in (draft, target)]
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"drafter: {draft.path} has {sizes[0]} tokens and {target.path} has {sizes[1]}: a draft must have its target's vocabulary"
        )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("text_config")
    return found if isinstance(found, dict) else config


def _vocabulary(artifact: Artifact) -> dict[str, int] | None:
    """{token: id} of a directory's fast tokenizer; None where it has none."""
    file = artifact.path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        model = content["model"]["vocab"]
        entries = model.items() if isinstance(model, dict) else [(entry[0], place) for place, entry in enumerate(model)]
        return {**dict(entries), **{each["content"]: each["id"] for each in content.get("added_tokens", ())}}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}") from error


def _kept(path: Path, facts: Mapping[str, Any]) -> torch.Tensor | None:
    name = facts.get("kept_tokens")
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
        raise ArtifactError(f"{path / DRAFT}: kept_tokens must name a file beside it, not {name!r}")
    from safetensors.torch import load_file

    kept = load_file(path / name).get("kept_tokens")
    if kept is None or kept.dtype != torch.int32 or kept.dim() != 1 or not len(kept):
        raise ArtifactError(f"{path / name} holds no int32 vector kept_tokens")
    return kept.long()


def _trim(module: Any, kept: torch.Tensor, path: Path) -> None:
    """Let a model's head compute only the rows of these tokens."""
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ArtifactError(f"{path}: kept_tokens need a plain head, and this one is a {type(head).__name__}")
    if int(kept.min()) < 0 or int(kept.max()) >= head.out_features:
        raise ArtifactError(f"{path}: kept_tokens are ids below {head.out_features}, not {int(kept.max())}")
    rows = kept.to(head.weight.device)
    bias = None if head.bias is None else head.bias[rows]
    module.set_output_embeddings(linear_of(head.weight[rows], bias))


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A frozen linear layer of a weight `[out, in]` and a bias `[out]`."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().contiguous(), requires_grad=False)
    return layer
