"""Entry of the runtime: `load`, from a directory to a model that generates or embeds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.api.base import LazyTokenizer, from_pretrained
from runtime.api.model import Model
from runtime.checkpoint.artifact import MANIFEST, Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.checkpoint.export_directory import Export, find_export, verify_files
from runtime.config.dtypes import read_dtype
from runtime.config.settings import is_off
from runtime.decoding.seq2seq import generation_config
from runtime.drafting.config.artifact_draft import CHOICE
from runtime.engines.base import Engine, EngineOptions
from runtime.engines.blueprint import Blueprint
from runtime.engines.choose import load_engine, load_export, load_rank, recall_engine
from runtime.errors import ArtifactError, RequestError
from runtime.formats.quantization_config import refuse_prefix
from runtime.kernels.cpu import library
from runtime.kv_cache.policy.policy import choose_policy
from runtime.layers.adapter import check_adapter
from runtime.sampling.options import reject_unknown
from runtime.system.describe import integer, show
from runtime.system.device import choose_device
from runtime.system.ranks import MOST, rank_device
from runtime.system.sizes import byte_count

_log = logging.getLogger("compress.kv_cache")
# Hashing takes about a second a GB; below this it is not noticed, and a flipped bit is.
VERIFY_BYTES = 2**30
UNFINISHED = ".compress/run.json"  # what an interrupted run leaves
# Any of these means that the directory is meant to have a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_OPTIONS = [
    "device",
    "kernels",
    "threads",
    "dtype",
    "verify",
    "max_memory",
    "kv_cache",
    "drafter",
    "adapter",
    "prefix_cache",
    "cache_memory",
    "tensor_parallel",
    "scheme",
    "trust_remote_code",
]


def refuse_unfinished(path: str | Path) -> None:
    """ArtifactError where an interrupted run has left what is in a directory."""
    directory = Path(path)
    try:
        unfinished = (directory / UNFINISHED).is_file() and not (directory / MANIFEST).is_file()
    except OSError:  # whoever reads it says what is wrong with that name
        return
    if unfinished:
        raise ArtifactError(f"{directory} is an unfinished run of `compress apply`; finish it with --resume")


def load(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    kernels: str = "auto",
    threads: int | None = None,
    dtype: str | torch.dtype | None = None,
    verify: bool | None = None,
    max_memory: int | str | None = None,
    kv_cache: str | Mapping[str, Any] | bool | None = None,
    drafter: Any = None,
    adapter: str | Path | None = None,
    prefix_cache: int | str | None = None,
    cache_memory: int | str | None = None,
    tensor_parallel: int = 1,
    scheme: str | None = None,
    trust_remote_code: bool = False,
    **unknown: Any,
) -> Any:
    """Load a compressed artifact, an export of one (ONNX, TensorRT), or a plain Hugging Face checkpoint. Compressed weights stay packed.

    A causal language model comes as a `Model`, an encoder as an `EncoderModel`, an encoder-decoder as a `Seq2SeqModel`, a
    speech model (Whisper) as a `SpeechModel`.

    Args:
        path: the directory, or a hub id ("org/name").
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...
        kernels: "auto" picks the fastest exact kernel of each layer; "fast" also rounds activations to int8 where that is faster; a
            name from `Model.explain()` forces one ("reference" is plain torch).
        threads: CPU threads of torch, for the whole process; None leaves them as they are.
        dtype: compute dtype, "float32", "float16" or "bfloat16" (also "fp32", "fp16", "bf16"); None: the checkpoint's.
        verify: compare every file with its SHA-256 in the manifest first, and repacked weights of earlier loads
            (`runtime.engines.streaming`) with theirs; None does so up to 1 GiB, without the README.md of exports.
        max_memory: bytes, or "2GB", "1.5GiB": limit of what loading and computing add to the memory of this process (on a GPU: to
            the GPU's). Blocks that do not fit are read from disk in every step, while others compute. The limit covers weights, the
            buffers of a step, 160 MiB for imported modules, and the KV cache, which gets what is left: at least 64 MiB, or 2048
            positions where those take more. A call that needs more is refused, unless its own `cache_memory` allows it; engines
            without a paged cache let theirs grow. A draft model and its cache count too; sequences that do not fit in that cache are
            decoded without drafts. Causal language models only.
        kv_cache: compression of the cache of keys and values: a published name ("kivi", "snapkv", ...), a mapping such as {"keys":
            "int4", "values": "int4", "recent": 64}, JSON of one, or a .json file with one (`compress methods`, docs/guides/kv_cache.md).
            None: as the artifact says; False: a plain cache. A policy uses what `compress apply` calibrated for the artifact.
        drafter: speculative decoding (docs/guides/draft.md): a name ("lookup", "suffix", "recycling", ...), the directory of a draft model,
            settings ({"method": "lookup", "depth": 10}, {"model": "draft", "acceptance": "exact", "lengths": "goodput"}), a list of these
            (the first that expects enough proposes), or a `Drafter`. None: the artifact's own draft, if it has one; False: none. The
            output stays that of plain decoding.
        adapter: directory of a LoRA adapter saved by PEFT (docs/guides/finetune.md). The weights stay packed; transformers' modules run
            the model, not the fused engine. None: no adapter.
        prefix_cache: bytes, or "512MB": on engines with a paged cache, what the KV cache of ended calls may take, so that later prompts
            with the same beginning are not computed again, the longest unused dropped first; 0: nothing outlives a call. A cache that
            grew larger for the calls that were running is freed when the last of them ends (on a GPU it waits for the next ones). None: 512
            MiB, or a sixteenth of the memory that is free if that is less; with `max_memory`, never more than that leaves for the cache.
        cache_memory: bytes, or "8GB", that the KV cache which all calls share takes at most, on engines with a paged cache; a call's own
            `cache_memory` gives it a cache of its own. None: on a GPU 0.85 of the memory that is free once the weights are there; on a
            CPU 2 GB, or a quarter of the free memory if that is less, and more only where one prompt needs it. A second model on the
            same GPU finds room only where this is given.
        tensor_parallel: ranks that compute the model together, 1 to 8 (docs/guides/serve.md): processes that `torchrun --nproc-per-node N
            script.py` starts, each with a GPU of its own ("cpu" is for tests). All load the same directory with the same options and make
            the same calls, in one thread; each gets the same results. Only the engine with CUDA graphs does it: of models of the shape
            of Llama, Mistral, Qwen2 and Qwen3 (no mixtures), with a plain cache and no drafts.
        scheme: for an uncompressed checkpoint: round the linear layers of its blocks to the nearest integers while they are read, at each
            load: "W8A16", "W8A8-INT8", "LLM.int8" or another integer preset. The weights are those of `compress apply` with method rtn and
            scales minmax.
        trust_remote_code: run Python code that the checkpoint brings.

    Raises:
        RequestError: a wrong option. ArtifactError: the directory cannot be used. Both say why in one sentence.
    """
    reject_unknown(unknown, _OPTIONS, "load")
    together = integer(1, MOST)("tensor_parallel", tensor_parallel) > 1
    target = rank_device(device) if together else read_device(device)
    compute = read_dtype(dtype)
    bound = None if max_memory is None else byte_count("max_memory", max_memory)
    nothing = prefix_cache in (0, "0")
    kept = None if prefix_cache is None else 0 if nothing else byte_count("prefix_cache", prefix_cache)
    cache = None if cache_memory is None else byte_count("cache_memory", cache_memory)
    if drafter is not None and drafter is not False:
        from runtime.drafting.config.build import check_written

        check_written(drafter)
    if scheme is not None:
        from runtime.layers.rounding import read_scheme

        read_scheme(scheme)
    if threads is not None:
        torch.set_num_threads(integer(1)("threads", threads))
    beside = None if adapter is None else check_adapter(adapter)
    if beside is not None and bound is not None:
        raise RequestError("max_memory: a model with an adapter must fit in memory; leave out max_memory or adapter")
    export = find_export(path)
    if export is not None and not export.is_checkpoint:
        for name, asked, why in (
            ("drafter", drafter not in (None, False), "cannot take tokens back"),
            ("adapter", beside is not None, "has its layers compiled"),
            ("kv_cache", kv_cache is not None and not is_off(kv_cache), "has a cache of its own"),
            ("cache_memory", cache is not None, "has a cache of its own"),
            ("scheme", scheme is not None, "has its weights compiled"),
            ("tensor_parallel", together, "computes on one device"),
        ):
            if asked:
                raise RequestError(f"{name}: {export.path} is an export, whose engine {why}; load the artifact instead")
        if verify or (verify is None and export.total_bytes <= VERIFY_BYTES):
            export.verify(readme=bool(verify))
        engine = load_export(export, target, EngineOptions(kernels, threads, compute, bound))
        return _model(export.facts.get("kind", "decoder"), engine, export, trust_remote_code, kept)
    refuse_unfinished(path)
    artifact = Artifact(path, trust_remote_code)
    if target.type == "cpu" and kernels != "reference" and _is_for_c(artifact):
        library.begin()
    listed = artifact.manifest is not None or export is not None
    small = listed and artifact.checkpoint.total_bytes <= VERIFY_BYTES
    checked = bool(verify) or (verify is None and small)
    if checked:
        verify_files(artifact, export, readme=bool(verify))
    if target.type == "cuda":
        offer_kernels(artifact.path, target)
    if scheme is not None:
        from runtime.layers.rounding import round_artifact

        artifact = round_artifact(artifact, scheme, trust_remote_code)
    brings = (artifact.manifest or {}).get("draft") is not None or (artifact.path / CHOICE).is_file()
    blueprint = Blueprint(artifact, target, kernels, compute, trust_remote_code, beside)
    if together:  # before its policy, without which it cannot be loaded, is refused
        text = f"tensor_parallel={tensor_parallel}: {artifact.path} cannot be divided among ranks"
        refuse_prefix(artifact.config.get("quantization_config"), text)
    policy = choose_policy(kv_cache, artifact, lambda: blueprint.config)
    for sentence in () if policy is None else policy.idle(blueprint.config):
        _log.warning("kv_cache.%s", sentence)
    if together:
        for name, asked, why in (
            ("max_memory", bound is not None, "the part of each rank is loaded whole; leave it out"),
            ("adapter", beside is not None, "an adapter is not divided among ranks; leave it out, or merge it"),
            (
                "kv_cache",
                policy is not None,
                "a compressed cache is not divided among ranks; kv_cache=False has a plain one",
            ),
            (
                "drafter",
                drafter not in (None, False),
                "ranks would draft by their own clocks; drafter=False has no drafts",
            ),
            (
                "drafter",
                brings and drafter is None,
                "the artifact brings a draft, and ranks verify none; drafter=False has no drafts",
            ),
        ):
            if asked:
                raise RequestError(f"{name}: {artifact.path} is loaded with tensor_parallel={tensor_parallel}: {why}")
        if blueprint.kind != "decoder":
            text = f"{artifact.path} is an {blueprint.kind}, and only causal language models are divided among ranks"
            raise RequestError(f"tensor_parallel={tensor_parallel}: {text}")
        engine = load_rank(blueprint, tensor_parallel, kept, cache, scheme)
        if cache is not None:
            _bound_cache(engine, cache, artifact)
        return _model("decoder", engine, artifact, trust_remote_code, kept)
    known = recall_engine(blueprint, checked, policy) if bound is None else None
    if known is None and blueprint.kind != "decoder":
        if drafter not in (None, False):
            raise RequestError(
                f"drafter: {artifact.path} is an {blueprint.kind}; only causal language models are drafted for"
            )
        for name, limit in (("max_memory", bound), ("cache_memory", cache)):
            if limit is not None:
                raise RequestError(
                    f"{name}: {artifact.path} is an {blueprint.kind}, which is loaded whole; leave it out"
                )
        return _model(blueprint.kind, _whole_engine(blueprint), artifact, trust_remote_code)
    drafts = None
    if known is not None:
        engine = known
    elif bound is None or not (drafter is not None or brings):
        engine = load_engine(blueprint, checked, bound, policy)
    else:
        from runtime.drafting.memory_budget import load_both

        engine, drafts = load_both(blueprint, checked, bound, policy, drafter, trust_remote_code)
    if cache is not None:
        _bound_cache(engine, cache, artifact)
    speculation = None
    if (drafter is not None or brings) and (drafts is None or not drafts.left_out):
        from runtime.drafting.config.build import Target, choose_speculation

        models = {} if drafts is None else drafts.models
        speculation = choose_speculation(drafter, Target(artifact, engine, trust_remote_code, drafts=models))
    model = _model("decoder", engine, artifact, trust_remote_code, kept, lazy=known is not None)
    model.speculation = speculation
    return model


def _bound_cache(engine: Engine, most: int, artifact: Artifact) -> None:
    """Let the cache that calls share take at most so many bytes.

    Raises:
        RequestError: on this engine caches grow with their sequences.
    """
    if engine.lockstep and getattr(engine, "cache_factory", None) is None:
        raise RequestError(
            f"cache_memory needs an engine with a paged KV cache, and {artifact.path} runs on one without"
        )
    engine.cache_budget = most if engine.cache_budget is None else min(most, engine.cache_budget)


def _is_for_c(artifact: Artifact) -> bool:
    """Whether C probably computes the model: a guess from config.json, before transformers is imported, which takes seconds."""
    classes = artifact.config.get("architectures")
    decodes = isinstance(classes, list) and any("CausalLM" in str(name) or "LMHead" in str(name) for name in classes)
    return decodes or "quantization_config" in artifact.config


def _model(
    kind: str,
    engine: Any,
    source: Artifact | Export,
    trust_remote_code: bool,
    prefix_cache: int | None = None,
    lazy: bool = False,
) -> Any:
    # Importing what transformers reads a tokenizer with takes longer than the load of a known program. That it can be read was seen then.
    read = functools.partial(load_tokenizer, source.path, trust_remote_code)
    tokenizer = LazyTokenizer(read) if lazy and has_tokenizer(source.path) else read()
    if kind == "encoder":
        from runtime.api.encoder import EncoderModel

        return EncoderModel(engine, tokenizer, source)
    ends = end_of_sequence(source, tokenizer)
    if kind == "decoder":
        return Model(engine, tokenizer, source, ends, prefix_cache=prefix_cache)
    from runtime.api.seq2seq import Seq2SeqModel
    from runtime.api.speech import SpeechModel

    return (SpeechModel if engine.features else Seq2SeqModel)(engine, tokenizer, source, ends)


def _whole_engine(blueprint: Blueprint) -> Any:
    """Of an encoder or an encoder-decoder."""
    from runtime.engines.torch.encoder import TorchEncoderEngine
    from runtime.engines.torch.seq2seq import TorchSeq2SeqEngine

    kind = TorchEncoderEngine if blueprint.kind == "encoder" else TorchSeq2SeqEngine
    return kind(blueprint.build_module(), blueprint.device)


def offer_kernels(path: Path, device: torch.device) -> None:
    """Let what is loaded onto a GPU use the kernels that an export to triton has compiled for it; ArtifactError if they are damaged."""
    if (path / "kernels" / "index.json").is_file():
        from runtime.kernels.triton import aot

        aot.offer(path, device)


def read_device(device: str | torch.device) -> torch.device:
    """The device that "auto", a name or a device means; RequestError where it is not usable here."""
    return torch.empty(0, device=choose_device(device)).device  # "cuda" becomes "cuda:0", so that devices compare equal


def has_tokenizer(path: Path) -> bool:
    """Whether a directory has files of a tokenizer."""
    return any((path / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(path: Path, trust_remote_code: bool = False) -> Any:
    """The directory's tokenizer (transformers'), or None when it has none (token ids still work).

    Args:
        path: directory of an artifact, an export or a checkpoint.
        trust_remote_code: let it bring Python code that is run.

    Raises:
        ArtifactError: its files cannot be read.
    """
    return from_pretrained("AutoTokenizer", path, _TOKENIZER_FILES, "tokenizer", trust_remote_code=trust_remote_code)


def end_of_sequence(artifact: Artifact | Export | Checkpoint, tokenizer: Any) -> frozenset[int]:
    """Token ids that end a text: generation_config.json says it, else config.json, else the tokenizer."""
    generation = generation_config(artifact.path)
    text_config = artifact.config.get("text_config")
    for source in (generation, artifact.config, text_config if isinstance(text_config, dict) else {}):
        value = source.get("eos_token_id")
        if value is not None:
            values = value if isinstance(value, list) else [value]
            if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
                raise ArtifactError(
                    f"{artifact.path}: eos_token_id must be an integer or a list of them, not {show(value)}"
                )
            return frozenset(values)
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset() if own is None else frozenset([own])
