"""Draft model read from its directory: its engine, its head cut down to the tokens it proposes, the target it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import read_json
from runtime.checkpoint.headers import read_header
from runtime.config.settings import ConfigError, read
from runtime.drafting.config.target import UnfitError, check_fingerprint
from runtime.engines.torch.drafts import columns
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import refuse_prefix
from runtime.modeling.linear_modules import is_linear

DRAFT = "draft.json"


@dataclass
class DraftModel:
    """A loaded draft.

    Attributes:
        engine: computes it.
        kept: int64 `[k]`, the target's id of each of its logits; None: they are the same.
        facts: the content of draft.json; empty without one.
        cache_bytes: that its keys and values may take; None: any number.
    """

    engine: Any
    kept: torch.Tensor | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    cache_bytes: int | None = None


def load_draft(path: Path, target: Artifact, device: torch.device, trust_remote_code: bool = False) -> DraftModel:
    """Read a draft of a target.

    Args:
        path: a Hugging Face checkpoint or an artifact, maybe with a draft.json.
        target: what it shall propose for.
        device: of the target.

    Raises:
        RequestError: it is a draft of another target, needs prefix tokens, or has another vocabulary.
        UnfitError: its cache takes no tokens back. ArtifactError: it cannot be read.
    """
    from runtime.engines.blueprint import Blueprint
    from runtime.engines.choose import fused_engine

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


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a draft's file, by name; ArtifactError where it is damaged or not there."""
    from safetensors.torch import load_file

    read_header(file)  # says in a sentence what is wrong
    return load_file(file)


def why_not_back(engine: Any) -> str | None:
    """Why an engine's cache takes no tokens back, which a draft does after every step; None: it does."""
    if hasattr(engine, "make_memory"):  # pages keep every token of every layer
        return None
    found = columns(engine.module.config.get_text_config(decoder=True))
    if isinstance(found, str):
        return found
    windows = any(each.window for each in found)
    return "has layers of sliding_attention, whose caches forget tokens and take none back" if windows else None


def check_target(facts: Mapping[str, Any], draft: Artifact, target: Artifact) -> None:
    """RequestError where a draft says that it is another target's, needs prefix tokens, or where its tokens mean something else."""
    refuse_prefix(draft.config.get("quantization_config"), f"drafter: {draft.path} cannot draft")
    if facts.get("target") is not None:
        check_fingerprint(draft.path, facts, target)
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
    from tokenizers import Tokenizer

    file = artifact.path / "tokenizer.json"
    try:
        return dict(Tokenizer.from_file(str(file)).get_vocab()) if file.is_file() else None
    except Exception as error:  # whatever its parser raises
        raise ArtifactError(f"{file} cannot be read: {error}") from error


def _kept(path: Path, facts: Mapping[str, Any]) -> torch.Tensor | None:
    name = facts.get("kept_tokens")
    if name is None:
        return None
    if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
        raise ArtifactError(f"{path / DRAFT}: kept_tokens must name a file beside it, not {name!r}")
    kept = read_tensors(path / name).get("kept_tokens")
    if kept is None or kept.dtype != torch.int32 or kept.dim() != 1 or not len(kept):
        raise ArtifactError(f"{path / name} holds no int32 vector kept_tokens")
    return kept.long()


def _trim(module: Any, kept: torch.Tensor, path: Path) -> None:
    """Let a model's head compute only the rows of these tokens."""
    head = module.get_output_embeddings()
    if not is_linear(head):
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
