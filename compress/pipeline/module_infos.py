"""What a recipe's targets choose among: every module of a model that holds a weight matrix."""

from __future__ import annotations

from torch import nn

from compress.pipeline.kinds import is_head
from compress.pipeline.stream import StreamedModel
from compress.targets import ModuleInfo
from runtime.experts import routers
from runtime.matrices import sides


def module_infos(streamed: StreamedModel) -> list[ModuleInfo]:
    """In model order. Linear layers count as `Linear` whatever class of a model computes them, GPT-2's Conv1D among them."""
    choosing = routers(streamed.model)
    head = streamed.model.get_output_embeddings() if streamed.kind != "encoder" else None
    found = []
    for name, module in streamed.model.named_modules():
        shape = sides(module)
        if shape is not None and not is_head(streamed, name, module) and streamed.is_text(name):
            found.append(ModuleInfo(name, "Linear", shape, router=name in choosing, head=module is head))
        elif isinstance(module, nn.Embedding) and streamed.is_text(name):
            found.append(ModuleInfo(name, type(module).__name__, (module.num_embeddings, module.embedding_dim)))
    return found
