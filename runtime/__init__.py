"""Run compressed artifacts. `runtime.load(path)` is the whole interface; heavy imports wait until they are needed.

Importing this package also teaches transformers the quantization method `compress`, so that
`AutoModelForCausalLM.from_pretrained` reads our artifacts; transformers itself is not imported for that.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from runtime.layers.hook import install_hook
from runtime.system.aliases import ModuleAliases

if TYPE_CHECKING:
    from runtime.api.encoder import EncoderModel as EncoderModel
    from runtime.api.load import load as load
    from runtime.api.model import Model as Model
    from runtime.api.seq2seq import Seq2SeqModel as Seq2SeqModel
    from runtime.api.speech import SpeechModel as SpeechModel
    from runtime.api.tune import tune as tune
    from runtime.errors import ArtifactError as ArtifactError
    from runtime.errors import CompressError as CompressError
    from runtime.errors import RequestError as RequestError
    from runtime.layers.hf import CompressConfig as CompressConfig

_HOMES = {
    "ArtifactError": "runtime.errors",
    "CompressConfig": "runtime.layers.hf",
    "CompressError": "runtime.errors",
    "EncoderModel": "runtime.api.encoder",
    "Model": "runtime.api.model",
    "RequestError": "runtime.errors",
    "Seq2SeqModel": "runtime.api.seq2seq",
    "SpeechModel": "runtime.api.speech",
    "load": "runtime.api.load",
    "tune": "runtime.api.tune",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from runtime.system.distribution import installed

        distribution = installed()
        return distribution.version if distribution is not None else "0+unknown"
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


install_hook()  # transformers learns the quantization method
ModuleAliases(
    {
        "runtime.streaming": "runtime.engines.streaming",
        "runtime.decoding.drafters": "runtime.drafting.drafters",
        "runtime.artifact": "runtime.checkpoint.artifact",
        "runtime.hf": "runtime.layers.hf",
        "runtime.linear": "runtime.layers.compressed_linear",
        "runtime.loading": "runtime.api.load",
        "runtime.model": "runtime.api.model",
        "runtime.native": "runtime.system.native",
        "runtime.seq2seq": "runtime.api.seq2seq",
    }
).install()
