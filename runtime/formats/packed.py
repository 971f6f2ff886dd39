"""`packed`: the bits of `pack-quantized` for the integer schemes compressed-tensors cannot describe."""

from __future__ import annotations

from runtime.formats.checks import Shape, why_not_weights
from runtime.formats.pack_quantized import PackQuantized
from runtime.formats.scheme import Scheme


class Packed(PackQuantized):
    """Same tensors as `pack-quantized`; also a last group shorter than the others (ragged), and activation schemes of
    any kind.
    """

    name = "packed"
    own = True

    def why_not(self, scheme: Scheme, shape: Shape) -> str | None:
        reason = why_not_weights(scheme, shape)
        if reason is None and (scheme.weights is None or scheme.weights.type != "int"):
            reason = "it stores integer weights only"
        return reason
