"""Weight plan: what `prune` and `quantize` stages do to every layer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from compress.data.layout import TextRows
from compress.model.check_model import check_fits_model, check_shared, module_infos, reads_beside
from compress.model.context import Context
from compress.model.dry_run import check_runs
from compress.model.streamed import StreamedModel
from compress.model.tensor_model import transposed, vocabularies
from compress.quantize.weight_constraint import WeightConstraint, load_constraints
from compress.recipe import Stage
from compress.weights.assign import Uncompressed, assign
from compress.weights.layer_task import LayerTask
from runtime.errors import RequestError
from runtime.formats.scheme import Scheme
from runtime.modeling.experts import expert_of


@dataclass(frozen=True)
class Budget:
    """What the layers of a stage may take, or lose, together.

    Attributes:
        key: "bits" (per weight of these layers, with scales, zero points and indices), "size" (bytes of all tensors of the artifact) or
            "max_kl" (predicted, nats per token).
        amount: of it.
        path: of the key in the recipe.
    """

    key: str
    amount: float
    path: tuple[str | int, ...]


@dataclass(frozen=True)
class WeightPlan:
    """What becomes of the layers of a model.

    Attributes:
        context: of the model.
        tasks: of the layers that stages target.
        constraints: {layer: mask and grid that a recovery before has trained and that stay}.
        left: layers that default targets mean and that stay as they are.
    """

    context: Context
    tasks: Mapping[str, LayerTask]
    constraints: Mapping[str, WeightConstraint] = field(default_factory=dict)
    left: tuple[Uncompressed, ...] = ()

    @property
    def needs(self) -> set[str]:
        """What calibration must collect ("hessian", "ranges", "drift", "gradients"); empty where the weights alone decide."""
        return set().union(*(layer.needs for layer in self.tasks.values()))

    @property
    def budget(self) -> Budget | None:
        """What a stage's layers may take or lose together, as long as nothing was chosen for them; None: there is none."""
        task = next((task for task in self.tasks.values() if task.candidates), None)
        if task is None:
            return None
        key, amount = task.quantize.budget
        assert task.quantize_stage is not None
        return Budget(key, amount, ("stages", task.quantize_stage, "quantize", key))

    @property
    def outside(self) -> dict[str, LayerTask]:
        """The tasks of layers that are in no block."""
        return {name: layer for name, layer in self.tasks.items() if not self.context.streamed.is_inside(name)}

    @property
    def untie(self) -> bool:
        """Whether a shared embedding must be split, because only one of its two uses (or both, packed) is compressed."""
        shared = _shared(self.context.streamed)
        return any(name in shared for name in self.tasks)

    @property
    def static_inputs(self) -> list[str]:
        """Layers that round their inputs to one calibrated grid."""
        return [name for name, task in self.tasks.items() if _static(task.scheme)]

    def put_prefix(self, tokens: tuple[int, ...]) -> None:
        """Calibrate these grids behind prefix tokens, and say so in the layers' schemes."""
        self.context.put_prefix(tokens)
        for name in self.static_inputs:
            task = self.tasks[name]
            task.scheme = _behind(task.scheme, tokens)
            task.candidates = tuple(_behind(scheme, tokens) for scheme in task.candidates)

    def of_block(self, index: int) -> dict[str, LayerTask]:
        """The tasks of a block's layers."""
        prefix = self.context.streamed.block_prefix(index)
        return {name: layer for name, layer in self.tasks.items() if name.startswith(prefix)}

    def unsettled(self) -> WeightPlan:
        """The plan as it is where no recovery has settled anything yet."""
        return replace(self, tasks={name: replace(task, settled=-1) for name, task in self.tasks.items()})


def _static(scheme: Scheme) -> bool:
    return scheme.activations is not None and scheme.activations.dynamic is False


def _behind(scheme: Scheme, tokens: tuple[int, ...]) -> Scheme:
    assert scheme.activations is not None
    return replace(scheme, activations=replace(scheme.activations, prefix=tokens))


def check_prefix(plan: WeightPlan) -> None:
    """RequestError where static grids of inputs cannot be calibrated behind prefix tokens, whose own inputs stay as they are."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    context, names = plan.context, plan.static_inputs
    recipe, model = context.recipe, context.streamed.model
    index = next((i for name in names if (i := plan.tasks[name].quantize_stage) is not None), None)
    stage = next(stage for stage in recipe.stages if stage.index == index)
    layers = DynamicCache(config=context.streamed.config.get_text_config(decoder=True)).layers
    other = next((layer for layer in layers if not isinstance(layer, DynamicLayer)), None)
    expert = next((name for name in names if expert_of(model, name) is not None), None)
    if context.settled >= 0:
        reason = "a recovery trains them on text without a prefix"
    elif context.kept_tokens:
        reason = "the vocabulary is cut, and the quality of other tokens is measured on text without a prefix"
    elif expert is not None:
        reason = f"{expert} is an expert's, which is given tokens out of their rows"
    elif other is not None:
        reason = "the model has layers without keys and values, which clipped inputs of prefix tokens would reach"
    elif not recipe.calibration.packing:
        raise RequestError(recipe.calibration.at("packing", "prefix tokens are found on full rows; set packing: true"))
    else:
        return
    text = f"static activations cannot be calibrated behind the prefix of the kv_cache stage: {reason}"
    raise RequestError(recipe.origin.at((*stage.path, "activation_mode"), f"{text}; make the activations dynamic"))


def prepare(context: Context) -> WeightPlan:
    """The plan of all stages of `context.recipe` that compress layers.

    Args:
        context: its routed experts are apart.

    Raises:
        RequestError: with file and line, where a stage cannot be for the model.
    """
    recipe, streamed = context.recipe, context.streamed
    check_fits_model(recipe, streamed)
    assigned, left = assign(recipe, module_infos(streamed))
    tasks = {name: replace(task, settled=context.settled) for name, task in assigned.items()}
    _check_model_free(context, tasks)
    _check_represented(context, tasks)
    _check_output_aware(context, tasks)
    _check_reached(streamed, tasks, left)
    _check_budget(context, tasks)
    check_shared(streamed, tasks)
    if context.source is None and streamed.runs:  # else asked of the source: which layers stay may not be known yet
        check_runs(streamed, tasks)
    constraints = load_constraints(context.path) if context.settled >= 0 else {}
    for name, task in tasks.items():  # a budget was spent before they were trained
        if task.quantized and task.candidates:
            settled = constraints.get(name)
            tasks[name] = replace(task, scheme=task.scheme if settled is None else settled.scheme, candidates=())
    return WeightPlan(context, tasks, constraints, tuple(left))


def _check_model_free(context: Context, tasks: Mapping[str, LayerTask]) -> None:
    """RequestError where a recipe that is `model_free` has a stage that must see what layers read, or takes columns of weights for rows."""
    recipe = context.recipe
    if context.streamed.runs:
        return
    if (name := transposed(context.opened)) is not None:
        text = (
            f"{context.path} stores {name} as [inputs, outputs], which tensors alone do not tell: leave model_free out"
        )
        raise RequestError(recipe.origin.at(("model_free",), text))
    tied = _find_tied(context, tasks)
    if tied is not None:
        text = f"{tied} may be both the token embedding and the output head, which cannot be told without code: name it in ignore"
        raise RequestError(recipe.origin.at(("model_free",), text))
    task = next((task for task in tasks.values() if task.needs), None)
    if task is None:
        return
    pruned = replace(
        task, quantize=None, quantize_stage=None, candidates=(), scheme=Scheme(sparsity=task.scheme.sparsity)
    )
    index = task.prune_stage if pruned.needs else task.quantize_stage
    stage = next(stage for stage in recipe.stages if stage.index == index)
    text = (
        f"{stage.method} with these settings is calibrated on what layers read, and the recipe is model_free, which runs no model: prune "
        "by magnitude with allocation uniform, quantize by rtn with objective layer, dynamic activations and whole bits"
    )
    raise RequestError(recipe.origin.at(stage.path, text))


def _find_tied(context: Context, tasks: Mapping[str, LayerTask]) -> str | None:
    """A table or head among the layers of a model without code whose weight may be both."""
    model, config = context.streamed.model, context.opened.config
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    head = model.get_output_embeddings()
    if head is not None and not any(part.get("tie_word_embeddings") for part in parts):
        return None
    sizes = set(vocabularies(config))
    for name in tasks:
        module = model.get_submodule(name)
        table = isinstance(module, nn.Embedding) and (not sizes or module.num_embeddings in sizes)
        if table or module is head:
            return name
    return None


def _shared(streamed: StreamedModel) -> set[str]:
    """Modules whose weight is that of another one too."""
    return {name.rpartition(".")[0] for pair in streamed.ties.items() for name in pair}


def _check_represented(context: Context, tasks: dict[str, LayerTask]) -> None:
    """RequestError where a representation cannot have the dtype of weights, or is lossless and could not be, or would save nothing."""
    recipe, streamed, checkpoint = context.recipe, context.streamed, context.checkpoint
    shared = _shared(streamed)
    folding = next((task for task in tasks.values() if task.transform is not None), None)
    for name, task in tasks.items():
        form, weight = task.scheme.weights, f"{name}.weight"
        if form is None:
            continue
        dtypes = [streamed.dtype, *([checkpoint.dtype(weight)] if checkpoint.has(weight) else [])]
        reason = next(filter(None, map(form.why_not_dtype, dtypes)), None)
        if reason is None and form.lossless:
            if folding is not None:
                reason = f"stage {folding.quantize_stage} scales weights, and lossless ones must stay as they are; use another method there"
            elif name in shared:
                reason = "it shares its weight with another module, and two coded copies are larger than the one there is; ignore both"
        if reason is not None:
            stage = next(stage for stage in recipe.stages if stage.index == task.quantize_stage)
            raise RequestError(recipe.origin.at((*stage.path, "scheme"), f"{name}: {reason}"))


def _check_output_aware(context: Context, tasks: dict[str, LayerTask]) -> None:
    """RequestError where a stage asks for the loss of a model that is no decoder of text alone."""
    task = next((task for task in tasks.values() if task.output_aware), None)
    streamed = context.streamed
    if task is None or (streamed.kind == "decoder" and type(streamed.rows) is TextRows):
        return
    recipe = context.recipe
    stage = next(stage for stage in recipe.stages if stage.index == task.quantize_stage)
    name = type(streamed.model).__name__
    text = f"objective output (which quality: best sets) needs a decoder that reads only text, which {name} is not; give propagated"
    raise RequestError(recipe.origin.at((*stage.path, "objective"), text))


def _check_reached(streamed: StreamedModel, tasks: dict[str, LayerTask], left: list[Uncompressed]) -> None:
    """Layers outside of the blocks: refused where their methods need calibration, or moved from `tasks` to `left`."""
    head = streamed.model.get_output_embeddings()
    beside = reads_beside(streamed)
    inside = any(streamed.is_inside(name) for name in tasks)
    for name, task in list(tasks.items()):
        module = streamed.model.get_submodule(name)
        embedding = isinstance(module, nn.Embedding)
        if embedding and task.scheme.transform is not None:
            raise RequestError(f"{name} is an embedding, whose rows are looked up: it has no input_transform")
        if embedding and (task.needs or task.scheme.activations is not None):
            methods = ", ".join(m.name for m in task.methods)
            if task.propagated:
                raise RequestError(f"{name} is an embedding, which reads no hidden states: its objective must be layer")
            raise RequestError(
                f"{name} is an embedding, which {methods} cannot compress; use method rtn with a weight-only scheme for it"
            )
        if streamed.is_inside(name) or module is head or embedding:
            continue
        by_default, why = inside and task.by_default, "is in no block and is no output head"
        if task.needs:
            why += ", so calibration does not reach it"
            if not by_default:
                raise RequestError(f"{name} {why}; use method rtn for it, or name it in ignore")
        elif beside and by_default:
            # What layers read beside hidden states is computed with it, before it is compressed.
            why += ", and what layers read beside hidden states depends on it"
        else:
            continue
        left.append(Uncompressed(name, f"it {why}"))
        del tasks[name]


def _check_budget(context: Context, tasks: Mapping[str, LayerTask]) -> None:
    """RequestError where two stages have a budget, or one that cannot be measured or met by choosing for layers of blocks."""
    recipe, streamed = context.recipe, context.streamed
    budgets = [s for s in recipe.stages if s.kind == "quantize" and s.config.budget is not None]
    if not budgets:
        return

    def refused(stage: Stage, text: str) -> RequestError:
        return RequestError(recipe.origin.at((*stage.path, stage.config.budget[0]), text))

    first, *more = budgets
    if more:
        raise refused(more[0], f"stage {first.index} has a budget, and a recipe has one; give whole bits here")
    key = first.config.budget[0]
    outside = next((name for name, task in tasks.items() if task.candidates and not streamed.is_inside(name)), None)
    if outside is not None:
        text = f"{outside} is in no block, and a budget is for layers of blocks: name it in ignore, or in a stage after this one"
        raise refused(first, text)
    if key == "max_kl" and streamed.kind == "encoder":
        raise refused(first, "an encoder predicts no tokens, so that there is no KL divergence; give bits or size")
    if key == "size" and any(stage.kind == "recover" and stage.index > first.index for stage in recipe.stages):
        raise refused(first, "what a later stage recover stores is not known yet; give bits or max_kl")


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
