"""Remove layers: those that a ranking says matter least, of every stack as many."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import nn

from compress.core.files import intact, seal, write_json
from compress.model.checkpoint_writer import PlainWriter, config_dict
from compress.model.config_sizes import with_layers
from compress.model.hybrid_layers import attending
from compress.model.streamed import StreamedModel
from compress.prune.structure.cutting import Cutting, best, check_ranks
from compress.prune.structure.view import View
from runtime.errors import RequestError
from runtime.modeling.experts import Experts, unfuse
from runtime.modeling.layer_sizes import overrides
from runtime.modeling.skeleton import build_skeleton, find_stacks


def remove_layers(cutting: Cutting) -> dict[str, Any]:
    """Write the smaller model; errors as of `remove_channels`.

    Returns:
        {"kept": for each stack the numbers of its layers that stay, "ranks": of all of them}, JSON-able.
    """
    streamed, output, work = cutting.streamed, cutting.output, cutting.work
    work.mkdir(parents=True, exist_ok=True)
    file = work / "layers.json"
    if not intact(file):
        write_json(file, _choose(cutting))
        seal(file)
    chosen = json.loads(file.read_text(encoding="utf-8"))
    places = [
        (stack.first + old, f"{stack.name}.{new}.")
        for stack, kept in zip(streamed.stacks, chosen["kept"], strict=True)
        for new, old in enumerate(kept)
    ]
    smaller = with_layers(streamed.config, chosen["kept"][0])
    skeleton = build_skeleton(smaller, torch.float32, stored=streamed.checkpoint.names())
    writer = PlainWriter(output, len(places) + 1, skeleton)
    for part in range(writer.done(), len(places)):
        index, prefix = places[part]
        own = streamed.block_prefix(index)
        names = streamed.block_names(index)
        writer.write(part, {prefix + name.removeprefix(own): streamed.checkpoint.get(name) for name in names}, {})
    if writer.done() == len(places):
        outside = {
            _moved(streamed, name, chosen["kept"]): streamed.checkpoint.get(name) for name in streamed.outside_names()
        }
        writer.write(len(places), outside, {})
    writer.finish(streamed.checkpoint.path, config_dict(streamed.checkpoint, streamed.config, smaller))
    return chosen  # type: ignore[no-any-return]


def _moved(streamed: StreamedModel, name: str, kept: list[list[int]]) -> str:
    """Layers for multi-token prediction have the numbers behind the last block's."""
    for stack, own in zip(streamed.stacks, kept, strict=True):
        prefix = f"{stack.name}."
        if name in streamed.behind and name.startswith(prefix):
            number, _, local = name.removeprefix(prefix).partition(".")
            return f"{prefix}{int(number) - len(stack.blocks) + len(own)}.{local}"
    return name


def _choose(cutting: Cutting) -> dict[str, Any]:
    job, streamed = cutting.job, cutting.streamed
    influence = _influence(cutting) if "influence" in job.needs else None
    kept, ranks = [], []
    for number, stack in enumerate(streamed.stacks):
        count = len(stack.blocks)
        if count != job.size.count:
            raise RequestError(f"a stack of {count} layers where config.json says {job.size.count} cannot be cut")
        own = slice(stack.first, stack.first + count)
        view = View(
            count=count,
            kept=job.kept,
            generator=torch.Generator().manual_seed(job.settings.seed + number),
            weights=[_norms(streamed, range(own.start, own.stop))] if job.method.name == "magnitude" else [],
            influence=None if influence is None else influence[own],
        )
        rank = check_ranks(job.method.rank(view, job.settings), f"the layers of {stack.name}", job.method.name)
        kept.append(_fitting(streamed, own.start, rank, job.kept))
        ranks.append([float(value) for value in rank])
    if any(other != kept[0] for other in kept) and _lists(streamed.config, job.size.count):
        raise RequestError("the stacks would keep different layers, and config.json has one list for both")
    return {"kept": kept, "ranks": ranks}


def _fitting(streamed: StreamedModel, first: int, rank: torch.Tensor, count: int) -> list[int]:
    """The layers that stay, ascending. One whose tensors no other has (T5's first has the bias of positions) cannot move, nor go."""
    shapes = [_layout(streamed, first + index) for index in range(len(rank))]
    rank = rank.clone()
    for index, shape in enumerate(shapes):
        if shapes.count(shape) == 1 and len(rank) > 1:
            rank[index] = torch.inf
    found: list[int] = best(rank, count).tolist()
    if streamed.kind == "decoder":
        others = [index for index in rank.argsort(descending=True, stable=True).tolist() if index not in found]
        found = attending(streamed.config, found, others, min(reversed(found), key=lambda index: float(rank[index])))
    places = _places(streamed, first, found)
    wrong = next((new for new, old in enumerate(found) if places[new] != _built(streamed.blocks[first + old])), None)
    if wrong is not None:
        raise RequestError(
            f"layer {found[wrong]} of a {type(streamed.model).__name__} would come to the place of layer {wrong}, which is built otherwise"
        )
    return found


def _places(streamed: StreamedModel, first: int, found: list[int]) -> list[dict[str, tuple[int, ...]]]:
    """How the smaller model's layers are built, in the stack whose first block is `first`."""
    smaller = build_skeleton(with_layers(streamed.config, found), torch.float32, stored=streamed.checkpoint.names())
    if any(isinstance(module, Experts) for module in streamed.model.modules()):
        unfuse(smaller)
    number = next(number for number, stack in enumerate(streamed.stacks) if stack.first == first)
    return [_built(block) for block in find_stacks(smaller)[number][1]]


def _built(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in block.named_parameters()}


def _layout(streamed: StreamedModel, index: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name, where layers should not differ in them; names alone where the config says of each layer how large it is."""
    prefix, known = streamed.block_prefix(index), bool(overrides(streamed.config))
    names = streamed.block_names(index)
    return {name.removeprefix(prefix): () if known else streamed.checkpoint.shape(name) for name in names}


def _norms(streamed: StreamedModel, blocks: range) -> torch.Tensor:
    """`[layers, 1]`, the norm of all weights of each."""
    found = []
    for index in blocks:
        values = (streamed.checkpoint.get(name).float() for name in streamed.block_names(index))
        found.append(sum(float(value.square().sum()) for value in values) ** 0.5)
    return torch.tensor(found)[:, None]


def _influence(cutting: Cutting) -> torch.Tensor:
    """One minus the cosine of what enters and what leaves each block, mean over tokens: float32 `[blocks]`."""
    streamed, batches, reporter = cutting.streamed, cutting.batches, cutting.reporter
    count = len(streamed.blocks)
    reporter.phase("structure: influence of layers", count)
    states = cutting.states(len(batches))
    streamed.load_outside()
    streamed.prelude(list(batches), states)
    found = torch.zeros(count)
    with torch.inference_mode():
        for index in range(count):
            total = tokens = 0.0
            with streamed.loaded_block(index):
                for number, batch in enumerate(batches):
                    before = states.get(number).to(streamed.device)
                    after = streamed.run_block(index, before, batch)
                    length = streamed.own_length(index, batch)
                    turned = 1 - torch.cosine_similarity(before[:, :length].float(), after[:, :length].float(), dim=-1)
                    mask = None if batch[1] is None else batch[1].to(turned.device)
                    total += float((turned if mask is None else turned[mask]).sum())
                    tokens += turned.numel() if mask is None else int(mask.sum())
                    states.put(number, streamed.hand_over(index, after, batch))
            found[index] = total / max(tokens, 1)
            reporter.step(f"block {index}: influence {found[index]:.3f}")
    states.drop()
    return found


def _lists(config: Any, depth: int) -> bool:
    text = config.get_text_config(decoder=True)
    return any(
        re.search("layer", key) and isinstance(value, (list, tuple)) and len(value) == depth
        for key, value in text.to_dict().items()
    )
