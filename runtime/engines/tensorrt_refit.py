"""Weights back into a stripped plan, from the file beside it (`export.tensorrt.refit` writes it) or from the ONNX file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.errors import ArtifactError, CompressError


def put_weights(trt: Any, logger: Any, engine: Any, constants: Path) -> None:
    """Give `engine` all weights that its plan lacks.

    Raises:
        ArtifactError: the file is missing or damaged. CompressError: TensorRT refused a weight.
    """
    if not constants.is_file():
        raise ArtifactError(f"{constants} is missing; the plan has no weights without it")
    if constants.suffix == ".onnx":
        _from_onnx(trt, logger, engine, constants)
    else:
        _from_constants(trt, logger, engine, constants)


def _from_onnx(trt: Any, logger: Any, engine: Any, path: Path) -> None:
    refitter = trt.Refitter(engine, logger)
    parser = trt.OnnxParserRefitter(refitter, logger)
    if not parser.refit_from_file(str(path)):
        reason = " ".join(parser.get_error(0).desc().split()) if parser.num_errors else "it says no reason"
        raise CompressError(f"TensorRT refused the weights of {path.name}: {reason}")
    _finish(refitter, path)


def _from_constants(trt: Any, logger: Any, engine: Any, path: Path) -> None:
    import numpy as np
    from safetensors import SafetensorError, safe_open

    refitter = trt.Refitter(engine, logger)
    keep = []  # TensorRT reads them when it refits
    try:
        with safe_open(path, "np") as file:
            kinds = json.loads((file.metadata() or {})["constants"])
            # All: before any is set, TensorRT calls none missing (only partners of those that were set).
            for name in refitter.get_all_weights():
                if name not in kinds:
                    raise CompressError(f"{path.name} lacks {name}, which the plan needs")
                data = np.ascontiguousarray(file.get_tensor(name))
                keep.append(data)
                kind = getattr(trt.DataType, kinds[name]["dtype"])
                weights = trt.Weights(kind, data.ctypes.data, int(kinds[name]["count"]))
                if not refitter.set_named_weights(name, weights):
                    raise CompressError(f"TensorRT refused the weight {name} of {path.name}")
    except (SafetensorError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged: {error}") from error
    _finish(refitter, path)


def _finish(refitter: Any, path: Path) -> None:
    missing = refitter.get_missing_weights()
    if missing:
        raise CompressError(f"{path.name} lacks {missing[0]}, which the plan needs")
    if not refitter.refit_cuda_engine():
        raise CompressError(f"TensorRT could not put the weights of {path.name} into the engine; its log says why")
