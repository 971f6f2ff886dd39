"""The retrieval model: a small Llama whose attention heads are set to retrieve before any training."""

from __future__ import annotations

import torch
from training import VOCAB_SIZE
from training import make_model as untrained_model
from transformers import LlamaConfig, PreTrainedModel

HIDDEN_SIZE = 128
HEAD_DIM = 64
EMBEDDING_STD = 0.1


def make_model() -> PreTrainedModel:
    """Return the untrained model in float32."""
    # A base so slow that at 4096 tokens most dimensions of a head still compare content instead of position.
    model = untrained_model(
        LlamaConfig,
        rope_theta=1e7,
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    install_retrieval(model)
    return model


@torch.no_grad()
def install_retrieval(model: PreTrainedModel) -> None:
    """Start the model with the attention heads that retrieval needs; training then finds all the rest.

    Left to itself training needs thousands of steps for them, as the loss first falls by guessing among the values
    that have not been asked for.  Two heads of the first layer copy the previous token and the one before it (each
    into a subspace of its own), and one head of the second layer compares the current and the previous token with those
    two of every position, and copies the token it finds.
    """
    width, size, half = HIDDEN_SIZE, HEAD_DIM, HEAD_DIM // 2
    # Three subspaces for the current token and the two before it, and what is left: all orthogonal to the first
    # dimension, which is made a constant, because heads that look at positions alone need something to read.
    basis = torch.zeros(width, width)
    basis[1:, 1:] = torch.linalg.qr(torch.randn(width - 1, width - 1))[0]
    current, before, earlier, rest = basis[1:].split([32, 32, 32, width - 97])
    embedding = model.model.embed_tokens.weight.normal_(std=EMBEDDING_STD)
    embedding -= 0.8 * (embedding @ before.T @ before + embedding @ earlier.T @ earlier)
    embedding[:, 0] = 5 * EMBEDDING_STD

    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for linear in (first.q_proj, first.k_proj, first.v_proj, second.q_proj, second.k_proj, second.v_proj):
        linear.weight[:size].zero_()
    # Keys are one vector and queries the same vector turned by the rotary angle of the distance, so that they agree
    # best at that distance.  The fast dimensions tell near positions apart, the slower ones far positions.
    fast, sharpness = 12, 1.6
    first.k_proj.weight[:fast, 0] = sharpness
    for head, (distance, space) in enumerate(((1, before), (2, earlier))):
        angle = distance * model.model.rotary_emb.inv_freq[:fast]
        query = first.q_proj.weight[head * size : (head + 1) * size].zero_()
        query[:fast, 0] = sharpness * angle.cos()
        query[half : half + fast, 0] = -sharpness * angle.sin()
        out = first.o_proj.weight[:, head * size : (head + 1) * size].zero_()
        out[:, :32] = 0.6 * space.T
    first.v_proj.weight[:32] = 0.4 * current

    # The slow half of the dimensions, which compares content over any distance: half of it for each token of a key.
    compared = ((half // 2, current, before), (half + half // 2, before, earlier))
    for begin, query_space, key_space in compared:
        mixed = 3.0 * torch.linalg.qr(torch.randn(32, 32))[0][: half // 2]
        second.q_proj.weight[begin : begin + half // 2] = mixed @ query_space
        second.k_proj.weight[begin : begin + half // 2] = mixed @ key_space
    copied = torch.cat([current, rest])
    second.v_proj.weight[: len(copied)] = copied
    second.o_proj.weight[:, :size].zero_()
    second.o_proj.weight[:, : len(copied)] = 0.5 * copied.T


def hidden_states(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the normalised last hidden states ``[rows, n, hidden]`` of ``ids`` ``[rows, n]``, causal attention.

    The layers are called one by one because the model itself takes a jump in the positions for the border of two
    packed sequences, and would hide the context from the questions.
    """
    decoder = model.model
    states = decoder.embed_tokens(ids)
    rotary = decoder.rotary_emb(states, position_ids=positions)
    for layer in decoder.layers:
        states = layer(states, attention_mask=None, position_embeddings=rotary, position_ids=positions)
    return decoder.norm(states)
