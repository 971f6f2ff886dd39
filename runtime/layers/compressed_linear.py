"""`CompressedLinear` and `CompressedEmbedding`: layers whose weight stays packed in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from runtime import formats
from runtime import kernels as kernel_table
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import ModuleEntry
from runtime.kernels import Choice, Layer, tuning
from runtime.layers.compressed_module import CompressedModule
from runtime.modeling.linear_modules import sides


class CompressedEmbedding(CompressedModule):
    """`ids` int `[...]` -> `[..., embedding_dim]` in `dtype`, from a table `[num_embeddings, embedding_dim]` in any format.

    Only the rows that are looked up are dequantized.
    """

    def __init__(self, entry: ModuleEntry, shape: tuple[int, int], dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__(entry, shape, dtype, device)
        self.num_embeddings, self.embedding_dim = self.shape

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the table for `ids`, `[..., embedding_dim]`; `IndexError` for an id outside of it."""
        if self.kernel is None:  # nobody has looked at the tensors yet
            self.check()
        wanted, position = torch.unique(ids, return_inverse=True)
        if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.num_embeddings:
            raise IndexError(f"token id outside [0, {self.num_embeddings}) in embedding")
        storage, scheme = formats.get(self.entry.format), self.entry.scheme
        rows = storage.select_rows(self._tensors(), scheme, self.shape, wanted)
        shape = (wanted.numel(), self.embedding_dim)
        picked = storage.unpack(rows, scheme, shape, self.dtype, check=False).dequantize()
        return picked[position]

    def dense(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """A plain nn.Embedding with the dequantized table."""
        table = nn.Embedding(self.num_embeddings, self.embedding_dim, device="meta")
        table.weight = nn.Parameter(self.dequantize().to(dtype or self.dtype), requires_grad=False)
        return table

    def extra_repr(self) -> str:
        """Sizes and format, for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.entry.format}"


class PackedWeight(torch.Tensor):
    """The weight `[out, in]` of a compressed layer: operations that read its values get the dequantized ones.

    Assigning `.data`, as PEFT does to merge an adapter, makes the layer a plain nn.Linear. Reading shape, dtype or device is free.
    """

    layer: CompressedLinear
    _is_hf_initialized: bool

    @staticmethod
    def __new__(cls, layer: CompressedLinear) -> PackedWeight:
        """Around a layer; no memory is taken."""
        wrapped = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        weight: PackedWeight = wrapped(cls, layer.shape, dtype=layer.dtype, device=layer.device)
        weight.layer = layer
        weight._is_hf_initialized = True  # transformers initialises no weight that a checkpoint brings
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data.__set__ and isinstance(args[0], PackedWeight):  # type: ignore[attr-defined]
            return args[0].layer.become_dense(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable and isinstance(args[0], PackedWeight):
            raise RequestError(
                f"{func} would write to a packed weight; assign to its .data, which makes the layer dense"
            )
        args, kwargs = tree_map_only(PackedWeight, lambda weight: weight.layer.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


class _Straight(torch.autograd.Function):
    """`y = kernel(x)` with the gradient of `x W^T + b`: a straight-through estimator of activation quantization.

    The backward pass dequantizes the weight, one layer at a time, and does not keep it.
    """

    @staticmethod
    def forward(ctx: Any, layer: CompressedLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return layer.compute(x, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        (gradient,), (_, x, bias) = gradients, ctx.needs_input_grad
        to_x = gradient @ ctx.layer.dequantize().to(gradient.dtype) if x else None
        return None, to_x, gradient.flatten(0, -2).sum(0) if bias else None


class CompressedLinear(CompressedModule, nn.Linear):
    """`y = x W^T + b` with `x` `[..., in]` and `W` `[out, in]` packed, computed in `dtype` and returned in that of `x`.

    Gradients reach `x` and the bias; the weight itself is not trained. It is an nn.Linear, so that PEFT finds it.

    Attributes:
        entry: scheme and storage format.
        choice: the kernels chosen by `prepare`, one a shape class; None (the reference computes) before.
        filling: `weight` is the stored tensor of that name (int8, float8), as who fills a model tensor by tensor looks for it.
    """

    filling = False

    def __init__(
        self, entry: ModuleEntry, shape: tuple[int, int], bias: bool, dtype: torch.dtype, device: Any = "meta"
    ) -> None:
        super().__init__(entry, shape, dtype, device)
        self.out_features, self.in_features = self.shape
        self.bias: nn.Parameter | None = None  # type: ignore[assignment]
        if bias:
            data = torch.empty(self.out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(data, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """`[out, in]`, dequantized each time its values are read."""
        stored = self._buffers.get("weight") if self.filling else None
        return PackedWeight(self) if stored is None else stored

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """As nn.Module's; a stored tensor may be called `weight` all the same."""
        if name == "weight":
            self._buffers.setdefault(name, None)
        super().register_buffer(name, tensor, persistent)

    @classmethod
    def from_tensors(
        cls,
        entry: ModuleEntry,
        shape: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> CompressedLinear:
        """A layer around stored tensors (`Format.pack`'s, plus `input_scale` for static activations).

        Raises:
            ArtifactError: a tensor is missing or does not fit.
        """
        module = cls(entry, shape, bias is not None, dtype)
        module.take(tensors)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        return module

    def prepare(self, kernels: str = "auto", choice: Choice | None = None) -> Choice:
        """Choose the kernels and lay the weight out for them; call once, after the tensors are loaded.

        Args:
            kernels: "auto", "fast" or a kernel's name; see `runtime.kernels.find`.
            choice: what was found for `kernels` already.

        Raises:
            RequestError: the kernel named cannot compute this layer.
            ArtifactError: tensors are missing or inconsistent.
        """
        self.unprepare()
        self.check()
        self.filling = False
        if "input_scale" in self._buffers:  # as compressed-tensors does, activation scales have the model's dtype
            self._buffers["input_scale"] = self._tensor("input_scale").to(self.dtype)
        layer = self.layer
        choice = choice or kernel_table.find(layer, kernels)
        self._replace(choice.decode.prepare(self._tensors(), layer))
        self.choice, self._wanted = choice, kernels
        return choice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., out_features]` by the kernel chosen for this number of rows."""
        if torch.is_grad_enabled() and (x.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            return _Straight.apply(self, x, self.bias)  # type: ignore[no-any-return, no-untyped-call]
        return self.compute(x, self.bias)

    def compute(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`forward` without gradients."""
        if self.choice is None:  # nobody has looked at the tensors yet
            self.check()
        transform, flat = self.entry.scheme.transform, x.reshape(-1, self.in_features)
        flat = (flat if transform is None else transform.of_inputs(flat, self._tensors())).to(self.dtype)
        kernel = kernel_table.REFERENCE if self.choice is None else self.choice.kernel(flat.shape[0])
        y = kernel.run(flat, self._tensors(), self.layer, None if bias is None else bias.to(self.dtype))
        return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    def dense(self, dtype: torch.dtype | None = None) -> nn.Linear:
        """A plain nn.Linear with the dequantized weight."""
        layer = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        layer.weight = nn.Parameter(self.dequantize().to(dtype or self.dtype), requires_grad=False)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.data.to(dtype or self.dtype), requires_grad=False)
        return layer

    def become_dense(self, weight: torch.Tensor) -> None:
        """Turn into a plain nn.Linear with a weight `[out, in]`, in place, so that all references see it."""
        bias = self.bias
        for name in [name for name in vars(self) if name not in vars(nn.Module())]:
            del self.__dict__[name]
        self._buffers.clear()
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.out_features, self.in_features = weight.shape
        self._parameters = {"weight": nn.Parameter(weight.detach(), requires_grad=False), "bias": bias}

    def explain(self, rows: int = 1) -> str:
        """How `rows` tokens are computed."""
        return (self.choice or kernel_table.reference()).kernel(rows).path(rows) + self.kernel_note

    def extra_repr(self) -> str:
        """Sizes, bias, format and kernel, for `repr`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"format={self.entry.format}, kernel={self.kernel_name}"
        )


def install(model: nn.Module, entries: Mapping[str, ModuleEntry]) -> None:
    """Replace the nn.Linear (GPT-2's Conv1D too) and nn.Embedding modules that `entries` names by empty compressed
    ones.

    New modules are on the device of the weight they replace (usually meta).

    Raises:
        ArtifactError: a named module does not exist, is of a kind that cannot be compressed, or has a shape its format
            cannot hold.
    """
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    for name, entry in entries.items():
        try:
            old = model.get_submodule(name)
        except AttributeError:
            raise ArtifactError(f"quantization_config names module {name}, which the model does not have") from None
        for tied, source in ties.items():
            if f"{name}.weight" in (tied, source):
                raise ArtifactError(f"config.json ties {tied} to {source}, but {name} is compressed on its own")
        model.set_submodule(name, _compressed(name, old, entry))


@dataclass(frozen=True)
class Chosen:
    """The kernels of one module, and what they were asked for as."""

    choice: Choice
    wanted: str


def choose(
    model: nn.Module, kernels: str = "auto", dtype: torch.dtype | None = None, device: torch.device | None = None
) -> dict[str, Chosen]:
    """{compressed module: its kernels}, which needs no weights: `dtype` and `device` are what it will compute in and on (None: now).

    A kernel's name is used where that kernel fits, and the other layers get their best; RequestError when it fits nowhere. Kernels
    that this machine has not been asked about before are measured (`runtime.kernels.tuning`). How many layers are left to the
    reference, and why, goes to the log.
    """
    found: dict[str, Chosen] = {}
    computed: list[tuple[Layer, Choice]] = []
    refused, fits = "", False
    with tuning.measuring():
        for name, module in model.named_modules():
            if not isinstance(module, CompressedModule):
                continue
            if not isinstance(module, CompressedLinear):  # rows are looked up
                found[name] = Chosen(kernel_table.reference(), kernels)
                continue
            layer = Layer(module.entry, module.shape, dtype or module.dtype, device or module.device)
            try:
                found[name] = Chosen(kernel_table.find(layer, kernels), kernels)
                fits = True
            except RequestError as error:
                refused = refused or f"{error} ({name})"
                found[name] = Chosen(kernel_table.find(layer), "auto")
            computed.append((layer, found[name].choice))
    if refused and not fits:
        raise RequestError(refused)
    if kernels != kernel_table.REFERENCE.name:
        kernel_table.warn_of_reference(computed)
    return found


def prepare_all(model: nn.Module, kernels: str = "auto") -> dict[str, str]:
    """`prepare()` of every compressed module with what `choose` chose, after loading: {module: what computes it}.

    Raises:
        RequestError: the kernel named fits nowhere.
        ArtifactError: tensors are missing or inconsistent.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, CompressedModule)}
    for name, module in modules.items():
        module.check(name)
    for name, chosen in choose(model, kernels).items():
        modules[name].prepare(chosen.wanted, chosen.choice)
    return {name: module.kernel_name for name, module in modules.items()}


def _compressed(name: str, old: nn.Module, entry: ModuleEntry) -> CompressedModule:
    weight = getattr(old, "weight", None)
    if isinstance(old, CompressedModule):
        raise ArtifactError(f"module {name} is compressed already")
    device = weight.device if isinstance(weight, torch.Tensor) else torch.device("meta")
    try:
        shape = sides(old)
        if shape is not None:  # also of transformers' Conv1D, which stores the transposed matrix
            return CompressedLinear(entry, shape, old.bias is not None, weight.dtype, device)  # type: ignore[union-attr]
        if isinstance(old, nn.Embedding) and type(old).forward is nn.Embedding.forward and old.max_norm is None:
            return CompressedEmbedding(entry, (old.num_embeddings, old.embedding_dim), old.weight.dtype, device)
    except RequestError as error:
        raise ArtifactError(f"module {name}: {error}") from None
    raise ArtifactError(f"module {name} is a {type(old).__name__}, which cannot hold a compressed weight")
