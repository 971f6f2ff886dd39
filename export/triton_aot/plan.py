"""Plan of an ahead-of-time export: launches of an artifact on each GPU, and its layers that no Triton kernel computes."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from export.source import Source, dtype_name
from export.target import missing_packages
from export.triton_aot.options import TritonOptions
from runtime import kernels as table
from runtime.engines import llama_structure
from runtime.engines.cuda.engine import PAGE
from runtime.engines.cuda.storage import Storage, storage_of
from runtime.engines.llama_structure import FeedForward, RoutedExperts
from runtime.engines.program import expert_stacks, joined
from runtime.kernels import REFERENCE, Choice, Kernel, Layer
from runtime.kernels.triton import gpu, jit, tuning
from runtime.kernels.triton.base import ROWS, TritonKernel
from runtime.kernels.triton.signature import Variant, of
from runtime.kv_cache.policy.policy import Policy
from runtime.layers.compressed_linear import CompressedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

META = torch.device("meta")

#: Names of kernels computed by Triton end so; the others are torch's.
_TRITON = "-triton"
#: Said of artifacts with a policy.
CACHE = (
    "its cache is compressed, and attention over it is not compiled ahead: triton compiles it where it is installed, "
    "plain torch computes it, slower, where it is not; runtime.load(..., kv_cache=False) takes a plain cache"
)


def dtype(source: Source, options: TritonOptions) -> torch.dtype:
    """What is computed in."""
    return source.dtype if options.dtype is None else getattr(torch, options.dtype)


def why_not(source: Source, options: TritonOptions) -> str | None:
    """As `Target.why_not`."""
    if not source.entries:
        return "it is not compressed, and only compressed artifacts are computed by Triton kernels"
    name = dtype_name(dtype(source, options))
    if name not in ("float16", "bfloat16"):
        return f"it computes in {name}, and the kernels in float16 and bfloat16; set dtype=bfloat16 (and load it so)"
    listed = {} if source.artifact.manifest is None else source.artifact.manifest["files"]
    taken = [name for name in listed if name in ("README.md", "export.json") or name.startswith("kernels/")]
    if taken:
        return f"its manifest lists {taken[0]}, which the export writes itself"
    if missing_packages(("triton",)):
        return None  # what is missing is said by name, and the kernels cannot be asked without it
    computed = [layers(source, options, capability) for capability in options.capabilities]
    kernels = {kernel for found in computed for kernel in found.values()}
    if any(kernel.endswith(_TRITON) for kernel in kernels):
        return None
    if kernels - {REFERENCE.name} and _fits_engine(source):
        return None  # its layers are torch's (float8), and the fused engine's own kernels Triton's
    count = f"any of its {len(computed[0])} compressed layers"
    return f"no Triton kernel computes {count} on {', '.join(options.gpus)} ({tally(computed[0])})"


def _fits_engine(source: Source) -> bool:
    """Whether the fused engine runs an artifact of whose layers Triton computes none: its experts, if it has any, are dense."""
    program = llama_structure.read_program(source.skeleton)
    if isinstance(program, str):
        return False
    names = {module: name for name, module in source.skeleton.named_modules()}
    experts = tuple(f"{names[mixture.module]}." for mixture in program.mixtures)
    return not any(name.startswith(experts) for name in source.entries)


def layers(source: Source, options: TritonOptions, capability: int) -> dict[str, str]:
    """{compressed linear layer: the kernel that the runtime takes for it on this GPU}."""
    found = {}
    with gpu.assuming(capability):
        for name, entry in source.entries.items():
            if name not in source.embeddings:
                found[name] = best(Layer(entry, source.shapes[name], dtype(source, options), META)).name
    return found


def others(kernels: dict[str, str]) -> dict[str, str]:
    """Those of `layers` that Triton does not compute."""
    return {name: kernel for name, kernel in kernels.items() if not kernel.endswith(_TRITON)}


def policy_of(source: Source) -> Policy | None:
    """How the artifact says that its cache is compressed."""
    given = (source.artifact.manifest or {}).get("kv_cache")
    return None if given is None else Policy.parse(given)


def cache_note(source: Source) -> str | None:
    """Said where attention over the artifact's compressed cache is not compiled ahead; None: no policy, or the fused engine holds it."""
    policy = policy_of(source)
    if policy is None or not isinstance(_storage(source.skeleton, policy), str):
        return None
    return CACHE


def _storage(model: PreTrainedModel, policy: Policy) -> Storage | str:
    """As `storage_of`, of a model that the fused engine runs; the reason why transformers' modules do."""
    program = llama_structure.read_program(model)
    return program if isinstance(program, str) else storage_of(policy, program, PAGE)


def launches(source: Source, options: TritonOptions, capability: int) -> Launches:
    """Everything that is to be compiled for one GPU."""
    from runtime.engines.blueprint import Blueprint

    compute = dtype(source, options)
    blueprint = Blueprint(source.artifact, META, "auto", compute, source.trust_remote_code)
    if compute != source.dtype:
        cast(nn.Module, blueprint.module).to(compute)
    return find(blueprint.module, capability, options.configs == "all", policy_of(source))


def tally(kernels: dict[str, str]) -> str:
    """How many layers each kernel computes."""
    return ", ".join(f"{count} {name}" for name, count in Counter(kernels.values()).most_common())


# Launches that a model makes on a GPU that is not here, found by walking through it with tensors on meta. The layers get the kernels that
# the table would choose on that GPU; where the fused engine would take the model over, its decoder is called as a step calls it, with
# q/k/v and gate/up joined; else every compressed layer is called by itself.
@dataclass
class Launches:
    """What is to be compiled for one GPU.

    Attributes:
        variants: what is launched, in the order found.
        kernels: {compressed layer: the kernel that computes it there}.
        engine: why the fused engine does not run the model; None when it does.
    """

    variants: list[Variant]
    kernels: dict[str, str]
    engine: str | None


def best(layer: Layer) -> Kernel:
    """What the table chooses for a layer on the GPU that is assumed (`gpu.assuming`)."""
    return table.on_gpu(replace(layer, device=META))[0]


def find(model: PreTrainedModel, capability: int, every: bool = True, policy: Policy | None = None) -> Launches:
    """The launches of a model whose compressed layers are installed and on meta, on a GPU of compute capability 80, 90, 100.

    Args:
        every: each configuration that tuning may choose; False: the default ones only.
        policy: of its cache. Where only transformers' modules hold it, launches of the fused engine are still found, for loads without
            a policy; those over the compressed cache are not.

    The model is used up: its layers get kernels and empty tensors.
    """
    with ExitStack() as stack:
        stack.enter_context(gpu.assuming(capability))
        stack.enter_context(torch.inference_mode())
        kernels = prepare(model)
        odd = llama_structure.why_not(model) or _why_not_stacked(model, kernels)
        storage = None if odd is not None or policy is None else _storage(model, policy)
        reason = storage if isinstance(storage, str) else odd
        launches = stack.enter_context(jit.recording())
        # By themselves too where they are joined: the table asks about each of them before.
        call_layers(model)
        if every:
            stack.enter_context(tuning.every_candidate())
        if every and reason is not None:
            call_layers(model)
        if odd is None:
            call_decoder(model, storage if isinstance(storage, Storage) else None)
    return Launches(list(dict.fromkeys(of(launch) for launch in launches)), kernels, reason)


def _why_not_stacked(model: PreTrainedModel, kernels: dict[str, str]) -> str | None:
    """The reason why the fused engine does not compute the experts of a prepared model together; None: it does, or there are none."""
    program = llama_structure.read_program(model)
    assert not isinstance(program, str), program
    names = {module: name for name, module in model.named_modules()}
    for mixture in program.mixtures:
        name = names[mixture.module]
        # These became dense layers, which the runtime has not.
        odd = {kernel for layer, kernel in others(kernels).items() if layer.startswith(f"{name}.")}
        if odd:
            return f"{name}: experts are computed by {min(odd)}"
        reason = expert_stacks.why_not(mixture.module, program.dtype)
        if reason is not None:
            return f"{name}: {reason}"
    return None


def prepare(model: nn.Module) -> dict[str, str]:
    """Give every compressed layer its kernel and tensors. Those that Triton does not compute become dense ones on meta."""
    found: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, CompressedLinear):
            continue
        kernel = best(module.layer)
        found[name] = kernel.name
        if isinstance(kernel, TritonKernel):
            _imagine(module, kernel)
        else:
            parent, _, leaf = name.rpartition(".")
            dense = nn.Linear(module.in_features, module.out_features, module.bias is not None, META, module.dtype)
            setattr(model.get_submodule(parent), leaf, dense)
    return found


def _imagine(module: CompressedLinear, kernel: TritonKernel) -> None:
    module.choice = Choice(kernel, kernel, kernel)
    module._replace(kernel.blank(module.layer, module.stored_dtype))


def call_layers(model: nn.Module) -> None:
    """Call every compressed linear layer on the meta device, once for each number of rows in `ROWS`."""
    for module in model.modules():
        if isinstance(module, CompressedLinear):
            for rows in ROWS:
                module(torch.empty(rows, module.in_features, dtype=module.dtype, device=META))


def call_decoder(model: PreTrainedModel, storage: Storage | None = None) -> None:
    """Steps and prompts of the fused engine, over plain pages and over those of a storage."""
    from runtime.engines.cuda import engine, ops
    from runtime.engines.cuda.cache import CacheLayer, Chunks, Memory, Rows
    from runtime.engines.cuda.decoder import Decoder
    from runtime.kernels.triton import experts

    parts = llama_structure.read_program(model)
    assert not isinstance(parts, str), parts  # `why_not` was asked
    blocks = [replace(block, qkv=_joined(block.qkv), mlp=_whole_mlp(block.mlp)) for block in parts.blocks]
    counts = {count for each in parts.mixtures for count in experts.token_counts(len(each.router), each.routing.chosen)}
    parts = replace(parts, blocks=blocks)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    width = -(-(context or engine.UNLIMITED) // PAGE)
    decoder = Decoder(parts, ops.kernels(), 1)
    decoder.rotations = decoder.rotations.to(META)
    hidden = parts.final_norm.shape[0]
    page = torch.empty(1, dtype=torch.int32, device=META)
    prompt = Chunks([0], [1], page, PAGE)  # launches are the same whatever its length
    for held, rows in itertools.product([None] if storage is None else [None, storage], sorted({*ROWS, *counts})):
        memory = Memory(parts, PAGE, 1, META, storage=held)
        # They are parts of one tensor in a step (`Steps`), so their addresses may be anything.
        numbers = [torch.empty(rows + 1, dtype=torch.int32, device=META)[1:] for _ in range(4)]
        tables = torch.empty(rows, width, dtype=torch.int32, device=META)

        def attend(
            layer: int,
            q: torch.Tensor,
            numbers: list[torch.Tensor] = numbers,
            tables: torch.Tensor = tables,
            layers: list[CacheLayer] = memory.layers,
        ) -> Any:
            window = parts.blocks[layer].window
            decoder.ops.chunk_attention(q[:1], layers[layer], prompt, parts.scale, window)
            return decoder.ops.decode_attention(q, layers[layer], tables, numbers[1], parts.scale, window)

        x = torch.empty(rows, hidden, dtype=parts.dtype, device=META)
        decoder(x, Rows(*numbers), memory, attend)
        if memory.stored is not None:
            decoder.ops.store(memory.stored, torch.empty(1, dtype=torch.int32, device=META))


def _whole_mlp(mlp: FeedForward | RoutedExperts) -> FeedForward | RoutedExperts:
    if isinstance(mlp, RoutedExperts):
        return replace(mlp, stacks=expert_stacks.stack_experts(mlp.module))
    return replace(mlp, gate_up=_joined(mlp.gate_up))


def _joined(layers: joined.Joined) -> joined.Joined:
    """As `Joined.of` joins them, but for looking at numbers."""
    dense = all(type(layer) is nn.Linear for layer in layers.layers)
    whole = joined.join_dense(layers.layers) if dense else _whole(layers.layers)
    if whole is not None:
        layers.layers = [whole]
    return layers


def _whole(layers: list[nn.Module]) -> CompressedLinear | None:
    linear = joined.alike(layers)
    if linear is None:
        return None
    first = linear[0]
    kernel = first.kernel
    if not isinstance(kernel, TritonKernel):
        return None
    whole = joined.empty_whole(linear)
    if best(whole.layer).layout != kernel.layout:
        return None
    _imagine(whole, kernel)
    return whole
