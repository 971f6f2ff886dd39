"""Calibration of KV-cache policies: what a cache must know of a model before its first prompt, found on the artifact as it will run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from compress.core.progress import Progress
from compress.kv_cache import gates
from compress.kv_cache.attention import AttentionCall
from compress.kv_cache.gates import GateOptions
from compress.kv_cache.outlier_tokens import RATIO, OutlierTokens, first_token
from compress.kv_cache.statistics import Observer
from compress.kv_cache.view import CalibrationView, Found
from compress.model.streamed import with_prefix
from runtime.api.load import load_tokenizer
from runtime.checkpoint.artifact import Artifact
from runtime.config.settings import calibrations_of
from runtime.engines.blueprint import Blueprint
from runtime.errors import RequestError
from runtime.kv_cache.policy.calibrated import calibrations, fingerprint
from runtime.kv_cache.policy.policy import Policy
from runtime.kv_cache.policy.presets import find_preset
from runtime.kv_cache.policy.registries import SCORES, SELECTIONS
from runtime.layers.unrounded import input_prefix, unrounded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Double Sparsity: channels of each head that contribute most to attention scores.

LEAST = 4
Rank = Literal["product", "variance"]


class HeavyChannels(Observer):
    """Observes how much each channel c of a key head contributes to attention scores (Double Sparsity, arXiv 2408.07092).

    By "product" that is the mean of |q_c k_c| over all pairs of a query and a key in a row, as the paper has it; query heads that share
    a key head share its channels, and are averaged. By "variance" it is the mean of q_c^2 times the variance of k_c over the row: what
    all keys have in common changes no order among them.

    Attributes:
        sums: float64 `[kv_heads, size]` of every layer.
        rows: how many were seen.
    """

    def __init__(self, rank: Rank = "product") -> None:
        self.rank = rank
        self.sums: dict[int, torch.Tensor] = {}
        self.rows = 0

    def attention(self, call: AttentionCall) -> None:
        batch, kv_heads, count, size = call.key.shape
        query, key = call.query.float().view(batch, kv_heads, call.groups, count, size), call.key.float()
        # The mean over pairs is the product of the means, so that no pair is ever made.
        if self.rank == "product":
            found = query.abs().mean((2, 3)) * key.abs().mean(2)
        else:
            found = query.square().mean((2, 3)) * key.var(2, correction=0)
        self.sums[call.layer] = self.sums.get(call.layer, 0) + found.double().sum(0).cpu()

    def batch_done(self, ids: torch.Tensor) -> None:
        self.rows += len(ids)

    def means(self) -> list[torch.Tensor]:
        """float64 `[kv_heads, size]` of every layer."""
        return [self.sums[layer] / max(1, self.rows) for layer in sorted(self.sums)]

    def chosen(self, count: int | None = None) -> list[list[list[int]]]:
        """`[layer][kv_head][count]`: the heaviest channels in ascending order; of equal ones the lower.

        Args:
            count: channels a head; None: an eighth of them, at least 4.

        Raises:
            RequestError: a head has not so many channels.
        """
        result = []
        for layer, means in enumerate(self.means()):
            size = means.shape[1]
            wanted = min(size, max(LEAST, size // 8)) if count is None else count
            if not 1 <= wanted <= size:
                raise RequestError(f"channels must be 1 to {size}, the size of a head of layer {layer}, not {wanted}")
            heaviest = means.argsort(dim=1, descending=True, stable=True)[:, :wanted]
            result.append(heaviest.sort(1).values.tolist())
        return result

    def share(self, chosen: list[list[list[int]]]) -> list[float]:
        """How much of the sum of all channels the chosen ones hold, layer by layer."""
        shares = []
        for means, heads in zip(self.means(), chosen, strict=True):
            held = means.gather(1, torch.tensor(heads)).sum() / means.sum().clamp(min=1e-30)
            shares.append(round(float(held), 4))
        return shares


def find_channels(view: CalibrationView) -> Found:
    """Heavy channels of a `CalibrationView`."""
    heavy = HeavyChannels(view.options.rank)
    view.observe(heavy)
    chosen = heavy.chosen(view.options.channels)
    return {"channels": (chosen, {"rank": heavy.rank, "share": heavy.share(chosen)})}


def find_prefix(view: CalibrationView) -> Found:
    """Prefix tokens of a `CalibrationView`."""
    outliers = OutlierTokens(view.options.ratio)
    view.observe(outliers)
    return {"prefix_tokens": outliers.finish(first_token(view.tokenizer))}


@dataclass(frozen=True)
class CalibrationOptions:
    """Settings of the calibrations of this package.

    Attributes:
        gates: how gates are trained; None: the defaults, with the policy's window.
        channels: heavy channels a head; None: an eighth of its size, at least 4.
        rank: how channels are ranked (`HeavyChannels`).
        ratio: how many times the median of its row a token's largest activation is where it is an outlier.
    """

    gates: GateOptions | None = None
    channels: int | None = None
    rank: Rank = "product"
    ratio: float = RATIO


#: Calibrations of this package's methods, by what they find. Methods of others have a static method `calibrate`.
CALIBRATORS: dict[str, Callable[[CalibrationView], Found]] = {
    "gates": gates.calibrate,
    "channels": find_channels,
    "prefix_tokens": find_prefix,
}


def calibrate(
    artifact: Path,
    needs: Collection[str] | Policy,
    rows: torch.Tensor,
    progress: Progress | None = None,
    seed: int = 0,
    options: CalibrationOptions | None = None,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Find what `needs` names. The whole model runs, in float32 on a CPU and in bfloat16 on a GPU, its compressed weights packed.

    Args:
        artifact: directory of a compressed artifact or plain checkpoint of a causal language model.
        needs: what methods have calibrated ("gates", "channels", "prefix_tokens", ...), or published methods that need it
            ("duoattention", ...); a policy is asked for what it misses, and its methods' settings count.
        rows: calibration data, int64 `[n, length]`, without padding.
        progress: who is told; a `compress.core.progress.Reporter` will do.
        seed: of everything random.
        options: of the calibrations of this package; None: the defaults.
        device: where the model runs: "cpu", "cuda", "cuda:1".
        trust_remote_code: let the checkpoint bring Python code that is run.

    Returns:
        JSON-able: `fingerprint` of the model; what was found under its name; `seconds` and `facts` of each. Layers are those with full
        attention.

    Raises:
        RequestError: an unknown need, rows that do not fit the model, a model without a cache to compress.
        ArtifactError: the directory cannot be used.
    """
    wanted = _wanted(needs)
    model, tokenizer = load(artifact, trust_remote_code, device)
    _check(rows, model)
    if prefix := input_prefix(model):  # its grids are good for tokens behind the prefix only
        if "gates" in wanted:
            raise RequestError(f"{artifact}: {gates.NO_PREFIX}")
        rows = with_prefix(rows, prefix)
    view = CalibrationView(model, tokenizer, rows, None, options or CalibrationOptions(), progress, seed)
    result: dict[str, Any] = {"fingerprint": fingerprint(model.config), "seconds": {}, "facts": {}}
    for need in sorted(wanted):
        if need in result:  # found beside another
            continue
        began = time.perf_counter()
        calibrator, method = _calibrator(need, needs)
        with unrounded(model, len(prefix)) if prefix else nullcontext():
            found = calibrator(replace(view, method=method))
        for name, (value, facts) in found.items():
            result[name], result["facts"][name] = value, facts
            result["seconds"][name] = round(time.perf_counter() - began, 2)
    return result


def load(
    artifact: Path, trust_remote_code: bool = False, device: str | torch.device = "cpu"
) -> tuple[PreTrainedModel, Any]:
    """The artifact's model as transformers' modules with its compressed weights packed; its tokenizer or None.

    It computes in float32 on a CPU and in bfloat16 on a GPU, where float32 would take twice the memory and many times as long.

    Raises:
        RequestError: it is no causal language model. ArtifactError: it cannot be used.
    """
    opened = Artifact(artifact, trust_remote_code)
    target = torch.device(device)
    dtype = torch.float32 if target.type == "cpu" else torch.bfloat16
    blueprint = Blueprint(opened, target, "auto", dtype, trust_remote_code)
    if blueprint.kind != "decoder":
        raise RequestError(f"{opened.path} is an {blueprint.kind}, which keeps no cache that could be compressed")
    return blueprint.build_module(), load_tokenizer(opened.path, trust_remote_code)


def _wanted(needs: Collection[str] | Policy) -> set[str]:
    if isinstance(needs, Policy):
        return set(needs.missing)
    known, wanted = calibrations(), set()
    for name in needs:
        preset = find_preset(name)
        found = {name} if name in known else set() if preset is None else set(Policy.parse(preset.name).needs)
        if not found:
            text = f"a cache policy cannot be calibrated for {name!r}; known are {', '.join(known)}"
            raise RequestError(text)
        wanted |= found
    return wanted


def _calibrator(need: str, needs: Any) -> tuple[Callable[[CalibrationView], Found], Any]:
    """What finds `need`, and the method that asks for it, with the settings that a policy gives it."""
    methods = needs.methods.values() if isinstance(needs, Policy) else ()
    asking = next((method for method in methods if need in calibrations_of(type(method))), None)
    owners = [method.load() for registry in (SCORES, SELECTIONS) for method in registry]
    for cls in owners if asking is None else [type(asking)]:
        if need in calibrations_of(cls) and hasattr(cls, "calibrate"):
            return cast(Any, cls).calibrate, asking
    return CALIBRATORS[need], asking


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
