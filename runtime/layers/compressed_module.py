"""`CompressedModule`: a weight that stays packed in memory, whatever layout a kernel wants it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from runtime import formats
from runtime import kernels as kernel_table
from runtime.errors import ArtifactError, RequestError
from runtime.formats.base import input_tensors
from runtime.formats.checks import Tensors, TensorSpec, check_tensor, join
from runtime.formats.quantization_config import ModuleEntry
from runtime.formats.scheme import CompressedWeight
from runtime.kernels import Choice, Kernel, Layer

PREPARED = "prepared_"  # prefix of the buffers a kernel's own layout lives in


class CompressedModule(nn.Module):
    """A weight `[rows, columns]` stored in one of our formats, as buffers named like the tensors on disk.

    `state_dict` always has the stored tensors, also after `prepare` has replaced them by a kernel's layout. Casting
    the module (`.to(dtype)`) changes the dtype it computes in, never the stored numbers.
    """

    def __init__(self, entry: ModuleEntry, shape: tuple[int, int], dtype: torch.dtype, device: Any = "meta") -> None:
        nn.Module.__init__(self)  # of a class that is an nn.Linear too, which would make a weight
        self.entry, self.shape, self.dtype = entry, (int(shape[0]), int(shape[1])), dtype
        self.stored_dtype = dtype
        self.choice: Choice | None = None
        self._wanted = "auto"  # what `prepare` was last asked for
        self._specs = self.specs(entry, self.shape, dtype)
        for name, spec in self._specs.items():
            self.register_buffer(name, torch.empty(spec.shape, dtype=spec.dtype, device=device))

    @staticmethod
    def specs(entry: ModuleEntry, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, TensorSpec]:
        """Every tensor the module expects on disk (without the bias)."""
        return formats.get(entry.format).tensors(entry.scheme, shape, dtype, entry.count)

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make stored tensors (`Format.pack`'s) the module's; ArtifactError where one is missing or does not fit."""
        for name, spec in self._specs.items():
            check_tensor(dict(tensors), name, spec, "")
            self._buffers[name] = tensors[name]

    @property
    def device(self) -> torch.device:
        """Where the weight is."""
        return next(iter(self._buffers.values())).device  # type: ignore[union-attr]

    @property
    def layer(self) -> Layer:
        """What kernels are asked about."""
        return Layer(self.entry, self.shape, self.dtype, self.device)

    @property
    def kernel(self) -> Kernel | None:
        """One of the kernels `prepare` chose (all read the same layout); None, the reference computes, before."""
        return None if self.choice is None else self.choice.decode

    @property
    def kernel_name(self) -> str:
        """What computes this module: a kernel's name, or `a (decode, batch), b (prefill)` where row counts differ."""
        return str(self.choice or kernel_table.reference()) + self.kernel_note

    @property
    def kernel_note(self) -> str:
        """`Kernel.note` of this weight."""
        return "" if self.kernel is None else self.kernel.note(self._tensors())

    def stored(self) -> Tensors:
        """The tensors as they are on disk; rebuilt exactly when a kernel keeps its own layout."""
        if self._replaced:
            weight = replace(self.compressed_weight(), dtype=self.stored_dtype)
            packed = formats.get(self.entry.format).pack(weight)
            return {name: self._buffers.get(name, packed.get(name)) for name in self._specs}  # type: ignore[misc]
        return {name: self._tensor(name) for name in self._specs}

    def compressed_weight(self) -> CompressedWeight:
        """The weight as codes, scales and mask, in the basis of its input transform; ArtifactError when the tensors are not right."""
        if self.kernel is None:
            self.check()
        return (self.kernel or kernel_table.REFERENCE).restore(self._tensors(), self.layer)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Dense weight `[rows, columns]` for untransformed inputs, in `dtype` (None: the module's)."""
        weight = replace(self.compressed_weight(), dtype=dtype or self.dtype).dequantize()
        transform = self.entry.scheme.transform
        return weight if transform is None else transform.of_weight(weight, self._tensors())

    def dense(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The plain torch module that holds the dequantized weight."""
        raise TypeError(f"{type(self).__name__} has no plain counterpart")

    def check(self, where: str = "") -> None:
        """Raise ArtifactError, naming the tensor, unless the loaded tensors are complete and consistent."""
        if self._replaced:
            return
        tensors = {name: self._tensor(name) for name in self._specs}
        for name, tensor in tensors.items():
            if tensor.device.type == "meta":
                raise ArtifactError(f"tensor {join(where, name)} was not loaded")
        formats.get(self.entry.format).validate(tensors, self.entry.scheme, self.shape, self.stored_dtype, where)
        for name, spec in input_tensors(self.entry.scheme, self.shape, self.stored_dtype).items():
            check_tensor(tensors, name, spec, where)
        for name in ("input_scale", "input_global_scale", "weight_global_scale"):
            scale = tensors.get(name)
            if scale is not None and not bool((scale > 0) & scale.isfinite()):
                raise ArtifactError(f"tensor {join(where, name)} is {float(scale)}, expected a positive number")
        transform = self.entry.scheme.transform
        if transform is not None and (found := transform.find_corruption(tensors)) is not None:
            raise ArtifactError(f"tensor {join(where, found[0])} {found[1]}")

    # ---------------------------------------------------------------- buffers
    @property
    def _replaced(self) -> bool:
        """True when a kernel's layout has taken the place of stored tensors."""
        return any(name not in self._buffers for name in self._specs)

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._buffers[name]
        assert tensor is not None
        return tensor

    def _tensors(self) -> Tensors:
        """What the current kernel reads, by the names it knows."""
        return {name.removeprefix(PREPARED): self._tensor(name) for name in self._buffers}

    def _replace(self, prepared: Tensors) -> None:
        for name in self._specs:
            if name not in prepared and not name.startswith("input_"):
                del self._buffers[name]
        for name, tensor in prepared.items():
            if self._buffers.get(name) is not tensor:
                self.register_buffer(PREPARED + name, tensor, persistent=False)

    def unprepare(self) -> None:
        """Go back to the stored tensors and the reference kernel."""
        stored = self.stored()
        for name in [n for n in self._buffers if n.startswith(PREPARED)]:
            delattr(self, name)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)
        self.choice = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        # A kernel's layout belongs to a device and a dtype, and a cast must not touch codes and scales.
        prepared, wanted = self.choice is not None, self._wanted
        self.unprepare()
        stored = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in stored.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        if prepared and self.device.type != "meta":
            try:
                self.prepare(wanted)
            except ArtifactError:
                raise
            except RequestError:  # the kernel that was named does not compute in this dtype or on this device
                self.prepare()
        return self

    def prepare(self, kernels: str = "auto", choice: Choice | None = None) -> Choice:
        """Check the loaded tensors and lay the weight out for the kernels that will read it (`choice`: found already)."""
        self.check()
        self.choice = kernel_table.reference()
        return self.choice

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._replaced:
            for name, tensor in self.stored().items():
                destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if any(
            prefix + name in state_dict for name in self._specs
        ):  # else others are loaded (adapters), and kernels stay
            self.unprepare()
        elif args[1]:  # strict: prepared buffers do not tell what is missing
            args[2].extend(prefix + name for name in self._specs if name not in self._buffers)
        super()._load_from_state_dict(state_dict, prefix, *args)
