"""Heads that were trained on a target: base of their drafters, their directory, and layers that are computed fast.

draft.json:
    schema_version  1
    method          "medusa" or "mtp"
    target          fingerprint of the checkpoint they were trained on
    vocabulary      its ids are below this
    hidden          width of its hidden states
    heads           sizes of the modules, as their builders read them
    rates           how often proposals are right, measured: Medusa by depth and rank, else by depth
    facts           what else was measured, plain data
    files           {name: {"bytes", "sha256"}} of all others

heads.safetensors: the modules' weights by name, and, of heads that propose only some tokens, "kept_tokens", int32 `[k]`, ascending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import MinLen
from torch import nn

from runtime import formats
from runtime.checkpoint.artifact import Artifact
from runtime.config.settings import Count, Fraction, built
from runtime.drafting.config.target import Target, UnfitError, check_fingerprint
from runtime.drafting.drafters.base import Drafter, Verified
from runtime.drafting.drafters.draft_model import DRAFT, linear_of, read_fact, read_tensors
from runtime.drafting.drafters.model import Candidates
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import CompressedWeight, GridScheme, Scheme
from runtime.kernels.cpu import library
from runtime.layers.compressed_linear import CompressedLinear
from runtime.modeling.linear_modules import is_linear

WEIGHTS = "heads.safetensors"
KEPT = "kept_tokens"
SCHEMA_VERSION = 1
_Rates = tuple[Annotated[tuple[Fraction, ...], MinLen(1)], ...]


@dataclass(eq=False)
class HeadDrafter(Drafter):
    """Drafter over modules that were trained on the target and are read with its head.

    Attributes:
        parts: of the target; its head is that of the tokens that are proposed.
        module: as it was trained.
        candidates: from its logits to tokens of the target.
    """

    source: ClassVar[str] = "heads"

    parts: TargetParts = built()
    module: nn.Module = built()
    candidates: Candidates = built()

    @classmethod
    def build(cls, target: Target, directory: Path, facts: Mapping[str, Any], **settings: Any) -> Drafter:
        parts = TargetParts.of(target.engine)
        files = read_heads(directory, facts, cls.name, target.artifact, parts)
        with torch.device("meta"):
            module, trained = cls.skeleton(files, parts)
        parts, module, candidates = files.install(module, parts)
        return cls(parts, module, candidates, **trained, **settings)

    @classmethod
    def skeleton(cls, files: HeadFiles, parts: TargetParts) -> tuple[nn.Module, dict[str, Any]]:
        """The module, empty, and other fields of the drafter that its directory says."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        self.vocabulary = self.candidates.vocabulary

    def learn(self, state: Any, verified: Verified) -> None:
        if verified.hidden is None:
            raise RequestError("the engine gives no hidden states, which heads read")
        self.note(state, verified, verified.hidden)

    def note(self, state: Any, verified: Verified, hidden: torch.Tensor) -> None:
        """As `learn`, with the hidden states; what is kept of them is copied, as a view would hold all of the step's."""
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int:
        return nbytes(self.module) + (0 if self.candidates.kept is None else nbytes(self.parts.head))


@dataclass
class HeadFiles:
    """What a directory holds.

    Attributes:
        path: the directory. facts: draft.json.
        weights: by name, on the CPU.
        kept: int64 `[k]`, the target's id of each token that is proposed; None: all.
    """

    path: Path
    facts: Mapping[str, Any]
    weights: dict[str, torch.Tensor]
    kept: torch.Tensor | None

    def size(self, name: str, kind: Any = Count) -> int:
        """A number of `heads` in draft.json."""
        return read_fact(self.path, self.facts, kind, "heads", name)

    def rates(self, depths: int) -> Sequence[Sequence[float]]:
        """The measured rates by depth and rank."""
        found: Sequence[Sequence[float]] = read_fact(self.path, self.facts, _Rates, "rates")
        if len(found) != depths:
            raise ArtifactError(
                f"{self.path / DRAFT}: rates must be {depths} lists, one for each head, not {len(found)}"
            )
        return found

    def install(self, module: nn.Module, parts: TargetParts) -> tuple[TargetParts, nn.Module, Candidates]:
        """Put the weights into a module (on meta), and round its linear layers; fields of a `HeadDrafter`.

        Raises:
            ArtifactError: weights are missing, or of other sizes than draft.json says.
        """
        expected = module.state_dict()
        for name, value in expected.items():
            stored = self.weights.get(name)
            if stored is None:
                raise ArtifactError(f"{self.path / WEIGHTS} has no tensor {name}")
            if stored.shape != value.shape or not stored.is_floating_point():
                raise ArtifactError(
                    f"{self.path / WEIGHTS}: tensor {name} is {stored.dtype} {list(stored.shape)}, expected {list(value.shape)}"
                )
        module.load_state_dict({name: self.weights[name] for name in expected}, assign=True)
        module.requires_grad_(False)
        round_linears(module, parts.dtype, parts.device)
        if self.kept is not None:
            head = rounded_linear(*parts.rows(self.kept), parts.dtype, parts.device)
            parts = replace(parts, head=head)
        return parts, module, Candidates(parts.vocabulary, self.kept)


def read_heads(path: Path, facts: Mapping[str, Any], method: str, target: Artifact, parts: TargetParts) -> HeadFiles:
    """Read heads of a target.

    Args:
        path: the directory. facts: its draft.json.
        method: that they must be of.
        target: what they shall propose for. parts: of its engine.

    Raises:
        RequestError: they are another target's, or of another method. ArtifactError: they cannot be read.
    """
    if facts.get("schema_version") != SCHEMA_VERSION or facts.get("method") != method:
        raise RequestError(
            f"drafter: {path} holds {facts.get('method')!r} of schema version {facts.get('schema_version')!r}, expected {method!r} of "
            f"{SCHEMA_VERSION}"
        )
    check_fingerprint(path, facts, target)
    for name, size in (("vocabulary", parts.vocabulary), ("hidden", parts.hidden)):
        if facts.get(name) != size:
            raise RequestError(
                f"drafter: {path} is for a {name} size of {facts.get(name)}, and {target.path} has {size}"
            )
    if not (path / WEIGHTS).is_file():
        raise ArtifactError(f"drafter: {path} has no {WEIGHTS}")
    weights = read_tensors(path / WEIGHTS)
    return HeadFiles(path, facts, weights, _kept(weights.pop(KEPT, None), path, parts.vocabulary))


def _kept(ids: torch.Tensor | None, path: Path, vocabulary: int) -> torch.Tensor | None:
    if ids is None:
        return None
    whole = ids.dtype == torch.int32 and ids.dim() == 1 and len(ids) > 0
    if not whole or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary or not bool((ids.diff() > 0).all()):
        raise ArtifactError(f"{path / WEIGHTS}: {KEPT} must be ascending int32 ids below {vocabulary}")
    return ids.long()


@dataclass
class TargetParts:
    """Of a loaded target.

    Attributes:
        embedding: ids to `[..., hidden]`. head: hidden states, after the final norm, to logits, of all tokens or of some.
        hidden: width of the hidden states. vocabulary: ids are below it.
        device: where both are. dtype: that drafts are computed in.
    """

    embedding: nn.Module
    head: nn.Module
    hidden: int
    vocabulary: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, engine: Any, where: str = "drafter") -> TargetParts:
        """Those of an engine; UnfitError where it does not show them."""
        module: Any = getattr(engine, "module", None)
        head = None if module is None else module.get_output_embeddings()
        if head is None or not hasattr(head, "in_features"):
            raise UnfitError((), f"{engine.description} shows no head and no embedding, which heads need", where)
        # Drafts are computed in float32 on CPUs, as the decoder in C does.
        dtype = torch.float32 if engine.device.type == "cpu" else _dtype(head)
        return cls(module.get_input_embeddings(), head, head.in_features, engine.vocab_size, engine.device, dtype)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` in `dtype`."""
        found: torch.Tensor = self.embedding(ids.to(self.device))
        return found.to(self.dtype)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 `[..., vocabulary]`, or of the head's tokens, of states `[..., hidden]`."""
        found: torch.Tensor = self.head(states.to(_dtype(self.head)))
        return found[..., : self.vocabulary].float()

    def rows(self, kept: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The head's weight `[k, hidden]`, dense, and bias `[k]`, of these tokens, int64 `[k]`; None: of all ids."""
        head: Any = self.head
        weight = head.dequantize() if isinstance(head, CompressedLinear) else head.weight
        chosen = slice(self.vocabulary) if kept is None else kept.to(weight.device)
        return weight.detach()[chosen], None if head.bias is None else head.bias.detach()[chosen]


def _dtype(layer: Any) -> torch.dtype:
    return layer.dtype if isinstance(layer, CompressedLinear) else layer.weight.dtype


_GRID = GridScheme(8, "int", True, "channel")
_MOST = 127  # of the codes; symmetric, so that -128 is never used


def rounded_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """A layer `[..., in]` to `[..., out]` in `dtype`.

    On CPUs with a C compiler each row of the weight is rounded to 255 values. What a draft proposes hardly changes, what the target
    writes does not at all, and reading weights is what takes a draft's time.

    Args:
        weight: `[out, in]`. bias: `[out]`.
    """
    if device.type != "cpu" or library.load() is None:
        return linear_of(weight.to(device, dtype), None if bias is None else bias.to(device, dtype))
    dense = weight.detach().float()
    scale = (dense.abs().amax(1, keepdim=True) / _MOST).clamp_min(torch.finfo(torch.float32).tiny)
    scheme, shape = Scheme(_GRID), (dense.shape[0], dense.shape[1])
    codes = (dense / scale).round().clamp(-_MOST, _MOST).to(torch.int8)
    storage = formats.choose(scheme, shape)
    tensors = storage.pack(CompressedWeight(codes, scale.to(dtype), None, None, scheme, dtype))
    layer = CompressedLinear.from_tensors(ModuleEntry(scheme, storage.name), shape, tensors, bias, dtype)
    layer.prepare()
    return layer


def round_linears(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear layers inside a module by `rounded_linear`, and move everything else to `dtype` and `device`."""
    for name, child in list(module.named_modules()):
        if is_linear(child):
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, rounded_linear(child.weight, child.bias, dtype, device))
    for child in module.modules():
        if not isinstance(child, CompressedLinear):
            for parameter in child.parameters(recurse=False):
                parameter.data = parameter.data.to(device, dtype)
                parameter.requires_grad_(False)
            for buffer in child.buffers(recurse=False):
                buffer.data = buffer.data.to(device)


def nbytes(module: nn.Module) -> int:
    """Memory of all parameters and buffers."""
    return sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers()))
