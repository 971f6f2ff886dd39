"""What a KV-cache policy must know of a model before it can run, found on the artifact as it will run."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.kv_cache.channels import HeavyChannels, Rank
from compress.kv_cache.gates import GateOptions, train_gates
from compress.kv_cache.prefix import RATIO, OutlierTokens
from compress.kv_cache.statistics import Observer, Progress, observe
from runtime.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from runtime.kv_cache.policy.policy import Policy

#: What can be calibrated, and the method that asks for it.
NEEDS = {"gates": "duoattention", "channels": "doublesparsity", "prefix_tokens": "prefixquant"}


def calibrate(
    artifact: Path,
    needs: Collection[str] | Policy,
    rows: torch.Tensor,
    progress: Progress | None = None,
    seed: int = 0,
    *,
    gates: GateOptions | None = None,
    channels: int | None = None,
    rank: Rank = "product",
    ratio: float = RATIO,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Find what `needs` names. The whole model runs, in float32 on a CPU and in bfloat16 on a GPU, its compressed weights packed.

    Args:
        artifact: directory of a compressed artifact or plain checkpoint of a causal language model.
        needs: some of "gates", "channels", "prefix_tokens", or the methods that need them ("duoattention", "doublesparsity",
            "prefixquant"); a policy is asked for what it misses, and what a streaming head of it sees is what gates are trained for.
        rows: calibration text, int64 `[n, length]`, without padding.
        progress: who is told; a `compress.core.progress.Reporter` will do.
        seed: of everything random.
        gates: how gates are trained; None: the defaults, with the policy's window.
        channels: heavy channels a head; None: an eighth of its size, at least 4.
        rank: how channels are ranked (`HeavyChannels`).
        ratio: how many times the median of its row a token's largest activation is where it is an outlier.
        device: where the model runs: "cpu", "cuda", "cuda:1".
        trust_remote_code: let the checkpoint bring Python code that is run.

    Returns:
        JSON-able: `fingerprint` of the model; `gates` `[layer][kv_head]`, `channels` `[layer][kv_head][count]`, `prefix_tokens`
        (each only where needed); `seconds` and `facts` of each. Layers are those with full attention.

    Raises:
        RequestError: an unknown need, rows that do not fit the model, a model without a cache to compress.
        ArtifactError: the directory cannot be used.
    """
    wanted = _wanted(needs)
    model, tokenizer = load(artifact, trust_remote_code, device)
    _check(rows, model)
    from runtime.kv_cache.policy.calibrated import fingerprint

    result: dict[str, Any] = {"fingerprint": fingerprint(model.config), "seconds": {}, "facts": {}}
    heavy, outliers = HeavyChannels(rank), OutlierTokens(ratio)
    observers: dict[str, Observer] = {"channels": heavy, "prefix_tokens": outliers}
    asked = [name for name in observers if name in wanted]
    if asked:
        began = time.perf_counter()
        observe(model, rows, [observers[name] for name in asked], progress)
        for name in asked:  # one pass for all of them
            result["seconds"][name] = round(time.perf_counter() - began, 2)
    if "channels" in wanted:
        result["channels"] = heavy.chosen(channels)
        result["facts"]["channels"] = {"rank": rank, "share": heavy.share(result["channels"])}
    if "prefix_tokens" in wanted:
        prefix = outliers.finish(_start(tokenizer))
        result["prefix_tokens"] = prefix.tokens
        result["facts"]["prefix_tokens"] = prefix.facts()
    if "gates" in wanted:
        trained = train_gates(model, tokenizer, rows, gates or _gate_options(needs), progress, seed)
        result["gates"] = trained.values
        result["seconds"]["gates"] = round(trained.seconds, 2)
        result["facts"]["gates"] = trained.facts()
    return result


def load(
    artifact: Path, trust_remote_code: bool = False, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, Any]:
    """The artifact's model as transformers' modules with its compressed weights packed; its tokenizer or None.

    It computes in float32 on a CPU and in bfloat16 on a GPU, where float32 would take twice the memory and many times as long.

    Raises:
        RequestError: it is no causal language model. ArtifactError: it cannot be used.
    """
    from runtime.api.load import load_tokenizer
    from runtime.checkpoint.artifact import Artifact
    from runtime.engines.torch.engine import Blueprint

    opened = Artifact(artifact, trust_remote_code)
    target = torch.device(device)
    dtype = torch.float32 if target.type == "cpu" else torch.bfloat16
    blueprint = Blueprint(opened, target, "auto", dtype, trust_remote_code)
    if blueprint.kind != "decoder":
        raise RequestError(f"{opened.path} is an {blueprint.kind}, which keeps no cache that could be compressed")
    return blueprint.build_module(), load_tokenizer(opened.path, trust_remote_code)


def _wanted(needs: Any) -> set[str]:
    by_method = {method: need for need, method in NEEDS.items()}
    wanted = {by_method.get(name.replace("-", ""), name) for name in getattr(needs, "missing", needs)}
    unknown = sorted(wanted - set(NEEDS))
    if unknown:
        raise RequestError(f"a cache policy cannot be calibrated for {unknown[0]!r}; known are {', '.join(NEEDS)}")
    return wanted


def _gate_options(needs: Any) -> GateOptions:
    """What a policy's streaming heads see, where it says so."""
    evict = getattr(needs, "evict", None)
    score = None if evict is None else evict.score.build()
    default = GateOptions()
    return GateOptions(
        sinks=int(getattr(score, "sinks", default.sinks)), recent=int(getattr(score, "recent", default.recent))
    )


def _check(rows: torch.Tensor, model: PreTrainedModel) -> None:
    if rows.dim() != 2 or rows.numel() == 0 or rows.dtype != torch.int64:
        raise RequestError(
            f"calibration rows must be int64 [n, length], not {str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
        )
    text = model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and rows.shape[1] > limit:
        raise RequestError(
            f"calibration rows of {rows.shape[1]} tokens are more than the {limit} positions of the model"
        )
    if int(rows.min()) < 0 or int(rows.max()) >= text.vocab_size:
        raise RequestError(f"calibration rows have token ids outside the model's vocabulary of {text.vocab_size}")


def _start(tokenizer: Any) -> int | None:
    """The token that texts begin with; families without one have been trained to see their end-of-text token there."""
    if tokenizer is None:
        return None
    bos: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos
