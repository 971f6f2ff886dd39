"""Stage `kv_cache`: storage of keys and values while the artifact generates; settings that its policy needs are calibrated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from compress.kv_cache.report import cache_quality, cache_section
from compress.model.stage import Job, StageRoom, Store
from compress.recipe.origin import Origin
from compress.recipe.stages import Phase, Stage, StageError
from runtime.config.settings import ConfigError
from runtime.errors import RequestError

if TYPE_CHECKING:
    from compress.core.progress import Reporter
    from compress.model.context import Context
    from runtime.kv_cache.policy.policy import Policy

PREFIX = "prefix"
"""Record of prefix tokens that were found before layers were compressed."""
# Limits that hold for weights and cache together, too: as NAME_overall.
_OVERALL = ("max_perplexity", "max_perplexity_increase")


@dataclass(frozen=True)
class CheckedCache(Job):
    """A cache policy that has been checked."""

    @property
    def policy(self) -> Policy:
        """As the recipe has it, before calibration."""
        return self.stage.config

    @property
    def needs(self) -> set[str]:
        """What the policy must know of the finished model."""
        return set(self.policy.missing)

    @property
    def title(self) -> str:
        """What takes time is calibration."""
        return "calibrate cache"

    @property
    def evaluation_title(self) -> str:
        """ "evaluate cache"."""
        return "evaluate cache"

    def describe(self) -> str:
        """The policy in words."""
        return self.policy.describe()

    def warnings(self, context: Context, size: int) -> list[str]:
        """Settings without an effect on this model; an artifact that is too large to be measured here."""
        large = reason_not_measured(context, size)
        idle = [f"kv_cache.{sentence}" for sentence in self.policy.idle(context.streamed.config)]
        return [*idle, *([large] if large else [])]

    def plan(self, context: Context) -> dict[str, Any]:
        """The policy, and the bytes of one sequence's cache."""
        return {"kv_cache": self._facts(context, self.policy)}

    @property
    def begins_texts(self) -> bool:
        """Whether it has prefix tokens before every prompt."""
        return not isinstance(self.policy.prefix, int)

    def text_prefix(self, context: Context, store: Store, reporter: Reporter) -> tuple[int, ...]:
        """The policy's prefix tokens, found on the model before its layers are compressed where the policy does not know them."""
        from compress.kv_cache.outlier_tokens import find_before_compression

        if "prefix_tokens" not in self.policy.missing:
            return self.policy.prefix_tokens
        found = store.directory.record(PREFIX)
        if found is None:
            spill = store.work / "hidden-prefix" if store.spill else None
            found = find_before_compression(context, spill, reporter)
            store.directory.commit(PREFIX, found)
        return self._calibrated(found).prefix_tokens

    def check_behind_prefix(self, context: Context) -> None:
        from compress.kv_cache.gates import NO_PREFIX
        from compress.model.streamed import check_room

        if "gates" in self.policy.missing:
            raise RequestError(context.recipe.origin.at(self.stage.path, NO_PREFIX))
        check_room(context.recipe.calibration.sequence_length, len(self.policy.prefix_tokens))

    @property
    def computes(self) -> bool:
        """Whether the policy must know something of the finished model."""
        return bool(self.policy.missing)

    def run(self, context: Context, store: Store, reporter: Reporter) -> dict[str, Any]:
        """Find it on the run's device, where the finished model must fit as a whole; see `compress.kv_cache.calibrate`."""
        from compress.kv_cache.calibrate import calibrate
        from runtime.kv_cache.policy.calibrated import Calibrated

        config = context.recipe.calibration
        if not config.packing:
            raise RequestError(config.at("packing", "the kv_cache stage is calibrated on full rows; set packing: true"))
        known = store.directory.record(PREFIX) or {}
        policy = self._calibrated(known)
        if not policy.missing:
            return known
        rows = torch.cat([ids for ids, _ in context.calibration.batches])
        device = context.streamed.device
        found = calibrate(store.output, policy, rows, reporter, context.recipe.seed, device=device)
        if not known:
            return found
        assert policy.calibrated is not None
        return policy.calibrated.joined(Calibrated.parse(found, ("calibrated",))).resolved()

    def evaluate(
        self,
        context: Context,
        store: Store,
        windows: torch.Tensor | None,
        record: Mapping[str, Any],
        metrics: dict[str, Any],
        reporter: Reporter,
    ) -> dict[str, Any]:
        """Add the quality of the artifact as it will run, its keys and values held as the policy says.

        What follows prompts is scored with the compressed and with a plain cache, on the run's device, where the finished model must fit as
        a whole. `perplexity_increase_overall` is what weights and cache cost together: the increase of whole windows times the cache's,
        which is measured a token of the artifact's and counts for as many of them as are as much text as one of the source's. The limits
        on perplexity hold for it too, and those on KL divergence and agreement for the cache alone. Where the model does not fit, the
        cache is not measured, which these limits do not forgive.
        """
        from compress.evaluate.limits import cache_limits, held_to
        from compress.evaluate.through_cache import through_cache
        from runtime.api.model import Model
        from runtime.checkpoint.artifact import Artifact
        from runtime.engines.blueprint import Blueprint
        from runtime.engines.choose import choose_engine

        config = context.recipe.evaluate
        if config is None or windows is None or "after" not in metrics:
            return metrics
        limits = {f"{name}_overall": limit for name, limit in config.limits().items() if name in _OVERALL}
        limits |= cache_limits(context.recipe)
        artifact = Artifact(store.output)
        reason = reason_not_measured(context, artifact.checkpoint.total_bytes)
        if reason:
            if reason not in reporter.warnings:  # known before the run began
                reporter.warn(reason)
            failed = [{"name": name, "limit": limits[name], "value": None, "ok": False} for name in sorted(limits)]
            return metrics | {"kv_cache": {"warning": reason}, "limits": metrics["limits"] + failed}
        # The manifest is not there yet, so this is what `runtime.load` does after it has looked for one.
        blueprint = Blueprint(artifact, context.streamed.device, "auto", None, False)
        # Where tokens lie changes no number, and the machine that compresses need not be the one that offloads.
        policy = replace(self._calibrated(record), offload=None)
        model = Model(choose_engine(blueprint.build(), blueprint, policy), None, artifact, frozenset())
        # Prefix tokens of a policy take places of the context.
        found = through_cache(model, windows[:, : model.engine.context_length], config.batch_size, reporter)
        if "warning" in found["kv_cache"]:
            reporter.warn(found["kv_cache"]["warning"])
        factor = (1.0 + found["perplexity_increase_with_cache"]) ** metrics.get("tokens_each", 1.0)
        overall = (1.0 + metrics["perplexity_increase"]) * factor - 1.0
        perplexity = metrics["after"]["perplexity"] * factor
        facts = found["kv_cache"]
        measured = {"max_kl_cache": facts["kl"], "min_agreement_cache": facts["top1_agreement"]}
        measured |= dict(zip((f"{name}_overall" for name in _OVERALL), (perplexity, overall), strict=True))
        checked = held_to(measured, limits)
        return metrics | found | {"perplexity_increase_overall": overall, "limits": metrics["limits"] + checked}

    def manifest(self, context: Context, record: Mapping[str, Any]) -> dict[str, Any]:
        """The policy with all that it must know, and the bytes of one sequence's cache."""
        policy = self._calibrated(record)
        return {"kv_cache": policy.resolved(), "kv_cache_bytes": self._facts(context, policy)["bytes"]}

    def _calibrated(self, record: Mapping[str, Any]) -> Policy:
        """The policy with what `run` has found beside what it knew; what is of another model is of no use."""
        from runtime.kv_cache.policy.calibrated import Calibrated

        if not record:
            return self.policy
        known, found = self.policy.calibrated, Calibrated.parse(record, ("calibrated",))
        if known is None or not known.found:
            return self.policy.with_calibrated(found)
        if known.fingerprint != found.fingerprint:
            what = ", ".join(sorted(known.found))
            text = f"the policy's {what} are of a model of fingerprint {known.fingerprint}, the finished one has {found.fingerprint}"
            raise RequestError(f"kv_cache.calibrated: {text}; leave them out, so that they are calibrated too")
        return self.policy.with_calibrated(known.joined(found))

    def _facts(self, context: Context, policy: Policy) -> dict[str, Any]:
        """The policy in words and in full, and the bytes of one sequence's cache."""
        from runtime.kv_cache.estimate import table
        from runtime.kv_cache.shape import Shape

        text = context.streamed.config.get_text_config(decoder=True)
        limit = getattr(text, "max_position_embeddings", None)
        shape = Shape.of(context.streamed.config, context.streamed.dtype)
        return {
            "method": policy.method,
            "description": policy.describe(),
            "needs": sorted(policy.missing),
            "policy": policy.resolved(),
            "bytes": table(shape, policy, limit),
        }


class KVCache(StageRoom):
    """The stage `kv_cache`; its config is a `runtime.kv_cache.policy.policy.Policy`."""

    name = "kv_cache"
    summary = "compress keys and values during generation"
    phase: Phase = "artifact"
    once = "a model has one cache, and stage {first} says how it is held; put all keys there"

    def methods(self) -> Mapping[str, Any]:
        """None: policies are combinations of what `runtime.kv_cache` has."""
        return {}

    def parse(self, fields: Any, index: int, origin: Origin) -> Stage:
        """Read a policy."""
        from runtime.kv_cache.policy.policy import Policy

        try:
            policy = Policy.parse(fields)
        except ConfigError as error:
            raise StageError(origin.at(("stages", index, self.name, *error.path), error.text)) from None
        return Stage(self.name, policy.method or "", policy, index)

    def resolved(self, stage: Stage) -> dict[str, Any]:
        """The policy with every default."""
        return stage.config.resolved()

    def report(self, manifest: Mapping[str, Any]) -> str:
        """The policy and the bytes of a sequence."""
        return cache_section(manifest)

    def quality(self, metrics: Mapping[str, Any]) -> str:
        """Perplexity through the cache, beside that of a plain one."""
        return cache_quality(metrics)

    def check(self, context: Context, stage: Stage) -> CheckedCache:
        """The policy must be for the model, and windows long enough to measure it on."""
        from compress.evaluate.through_cache import LEAST
        from runtime.kv_cache.policy.checks import check_module

        recipe = context.recipe
        try:
            stage.config.check_model(context.streamed.config)
            check_module(context.streamed.model)
        except ConfigError as error:
            raise RequestError(recipe.origin.at((*stage.path, *error.path), error.text)) from None
        if recipe.evaluate is not None and recipe.evaluate.sequence_length < LEAST:
            text = f"a kv_cache stage needs windows of at least {LEAST} tokens"
            raise RequestError(recipe.evaluate.at("sequence_length", text))
        return CheckedCache(stage)


def reason_not_measured(context: Context, size: int) -> str:
    """Why the cache of an artifact of `size` bytes cannot be measured on the run's device; "": it can, or there is nothing to do."""
    from compress.core.memory_bounds import MEMORY_SHARE
    from runtime.system.memory import available_bytes
    from runtime.system.sizes import size as words

    if context.recipe.evaluate is None or size <= MEMORY_SHARE * available_bytes(context.streamed.device):
        return ""
    return (
        f"the quality of the compressed cache is not measured, which takes the finished model as a whole: {words(size)}, "
        "more than is free; measure it on a larger machine with `compress eval`"
    )


STAGE = KVCache()
