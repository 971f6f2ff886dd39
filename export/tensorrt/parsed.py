"""The network through TensorRT's ONNX parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.errors import CompressError

MORE = 3  # errors that are told


def build_parsed(trt: Any, network: Any, logger: Any, path: Path) -> Any:
    """Parse an ONNX file, its external data beside it, into `network`.

    Returns:
        The parser; keep it until the network is built, because it holds the weights.

    Raises:
        CompressError: the parser refused it; one sentence with node, operator and reason of the first errors.
    """
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = [_sentence(parser.get_error(index)) for index in range(min(parser.num_errors, MORE))]
        rest = parser.num_errors - len(errors)
        more = f" (and {rest} more)" if rest > 0 else ""
        raise CompressError(f"TensorRT's parser refused {path.name}: {'; '.join(errors) or 'it says no reason'}{more}")
    return parser


def _sentence(error: Any) -> str:
    operator, node = error.node_operator(), error.node_name()
    where = f"{operator} {node}".strip() or f"node {error.node()}"
    return f"{where}: {' '.join(error.desc().split())}"
