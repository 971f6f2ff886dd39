"""Weight plan: what `prune` and `quantize` stages do to every layer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from compress.model.context import Context
from compress.model.dry_run import check_runs
from compress.model.streamed import StreamedModel
from compress.model.supported import check_fits_model, check_shared, module_infos, reads_beside
from compress.quantize.fixed import HELD, Held
from compress.quantize.fixed import load as load_held
from compress.recipe import Stage
from compress.weights.assign import Left, lay_out
from compress.weights.layer_work import LayerWork
from runtime.errors import RequestError


@dataclass(frozen=True)
class WeightPlan:
    """What becomes of the layers of a model.

    Attributes:
        context: of the model.
        work: {layer: what is done to it}, of those that a stage names.
        held: {layer: what a recovery before has left that is not to be chosen again}.
        left: layers that default targets mean and that stay as they are.
    """

    context: Context
    work: Mapping[str, LayerWork]
    held: Mapping[str, Held] = field(default_factory=dict)
    left: tuple[Left, ...] = ()

    @property
    def needs(self) -> set[str]:
        """What calibration must collect ("hessian", "ranges"); empty where the weights alone decide."""
        return set().union(*(layer.needs for layer in self.work.values()))

    @property
    def outside(self) -> dict[str, LayerWork]:
        """The work on layers that are in no block."""
        return {name: layer for name, layer in self.work.items() if not self.context.streamed.is_inside(name)}

    @property
    def untie(self) -> bool:
        """Whether a shared embedding must be split, because only one of its two uses (or both, packed) is compressed."""
        shared = {name.rpartition(".")[0] for pair in self.context.streamed.ties.items() for name in pair}
        return any(name in shared for name in self.work)

    def of_block(self, index: int) -> dict[str, LayerWork]:
        """The work on layers of a block."""
        prefix = self.context.streamed.block_prefix(index)
        return {name: layer for name, layer in self.work.items() if name.startswith(prefix)}

    def unsettled(self) -> WeightPlan:
        """The plan as it is where no recovery has settled anything yet."""
        return replace(self, work={name: LayerWork(own.assignment, own.sparsity) for name, own in self.work.items()})


def prepare(context: Context) -> WeightPlan:
    """The work of all stages of `context.recipe` that compress layers.

    Args:
        context: its routed experts are apart.

    Raises:
        RequestError: with file and line, where a stage cannot be for the model.
    """
    recipe, streamed = context.recipe, context.streamed
    check_fits_model(recipe, streamed)
    assigned, left = lay_out(recipe, module_infos(streamed))
    work = {name: LayerWork(assignment, settled=context.settled) for name, assignment in assigned.items()}
    _check_reached(streamed, work, left)
    check_shared(streamed, work)
    if context.source is None:  # else asked of the source: which layers stay may not be known yet
        check_runs(streamed, work)
    file = context.path / HELD
    held = load_held(file) if context.settled >= 0 and file.is_file() else {}
    return WeightPlan(context, work, held, tuple(left))


def _check_reached(streamed: StreamedModel, work: dict[str, LayerWork], left: list[Left]) -> None:
    """Layers outside of the blocks: refused where their methods need calibration, or moved from `work` to `left`."""
    head = streamed.model.get_output_embeddings()
    beside = reads_beside(streamed)
    inside = any(streamed.is_inside(name) for name in work)
    for name, layer in list(work.items()):
        module = streamed.model.get_submodule(name)
        embedding = isinstance(module, nn.Embedding)
        if embedding and (layer.needs or layer.scheme.activations is not None):
            methods = ", ".join(m.name for m in layer.methods)
            raise RequestError(
                f"{name} is an embedding, which {methods} cannot compress; use method rtn with a weight-only scheme for it"
            )
        if streamed.is_inside(name) or module is head or embedding:
            continue
        where = "in no block and is no output head"
        by_default = inside and layer.assignment.by_default
        if layer.needs and not by_default:
            raise RequestError(
                f"{name} is {where}, so calibration does not reach it; use method rtn for it, or name it in ignore"
            )
        if layer.needs:
            left.append(Left(name, f"it is {where}, so calibration does not reach it"))
            del work[name]
        elif beside and by_default:
            # What layers read beside hidden states is computed with it, before it is compressed.
            left.append(Left(name, f"it is {where}, and what layers read beside hidden states depends on it"))
            del work[name]


def check_settled(plan: WeightPlan, stage: Stage) -> None:
    """RequestError where `stage`, which trains the compressed layers on, would train what is in no block otherwise than it is stored."""
    modules = {name: plan.context.streamed.model.get_submodule(name) for name in plan.outside}
    embedding = next((name for name, module in modules.items() if isinstance(module, nn.Embedding)), None)
    text = ""
    if embedding is not None:
        text = f"a stage before compresses {embedding}, an embedding, which recovery does not train"
    elif plan.untie:
        text = "a stage before compresses the head, which shares its tensor with the embedding"
    if text:
        origin = plan.context.recipe.origin
        raise RequestError(origin.at(stage.path, f"{text}; ignore it there, or compress it after"))
