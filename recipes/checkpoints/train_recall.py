"""Train the bundled retrieval model: a small Llama that answers questions about its context.

The tasks are those of ``recall_task.py``.  The script needs ``torch``, ``transformers`` and the standard library of the
running Python, whose sources are the text of the ``needle`` task (split as ``train.py`` splits them); it downloads
nothing.  The model starts with the attention heads retrieval needs (see ``install_retrieval``).  Training begins with
short contexts, goes to the next length once most questions are answered, and ends with all lengths mixed and the
learning rate going to zero.

Examples::

    python recipes/checkpoints/train_recall.py --threads 1   # train, write the checkpoint, evaluate it
    python recipes/checkpoints/train_recall.py --resume      # go on from the last scratch checkpoint
    python recipes/checkpoints/train_recall.py --evaluate    # accuracy of the stored checkpoint, full cache
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
import recall_task as task

HERE = Path(__file__).resolve().parent
SOURCE_DIR = HERE / "stdlib-4m"
MODEL_DIR = HERE / "recall-1m"
#: Context lengths in the order of training, and how often each is drawn when they are mixed at the end: long rows are
#: dear, and it is the number of pairs, not the distance, that is hard to learn.
STAGES = (64, 128, 256, 512, 1024, 2048)
MIXTURE = "128:10,256:20,512:30,1024:29,2048:8,4096:3"
MAX_QUESTIONS = 64
LAYERS = 3
HIDDEN_SIZE = 128
HEAD_DIM = 64
EMBEDDING_STD = 0.1


def log(message: str) -> None:
    """Write one line to stderr."""
    print(message, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------------------------


def make_model() -> LlamaForCausalLM:
    """Return the untrained model in float32."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        # So slow that at 4096 tokens most dimensions of a head still compare content instead of position.
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.mul_(1.0 / math.sqrt(2 * LAYERS))
    install_retrieval(model)
    return model


@torch.no_grad()
def install_retrieval(model: LlamaForCausalLM) -> None:
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


def hidden_states(model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
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


def export(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model in bf16, and the tokenizer, replacing the files of ``out`` one by one."""
    copy = make_model()
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.config.dtype = torch.bfloat16
    copy.generation_config.do_sample = False
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SOURCE_DIR / name, out / name)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        copy.save_pretrained(scratch)
        for path in sorted(Path(scratch).iterdir()):
            path.chmod(0o644)
            os.replace(path, out / path.name)


# --------------------------------------------------------------------------------------------------------------------
# Optimizers
# --------------------------------------------------------------------------------------------------------------------


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Return about the nearest semi-orthogonal matrices to ``matrices`` ``[k, m, n]``: five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.775, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1)[:, None, None].clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon in float32, matrices of one shape together.

    ``torch.optim.Muon`` computes in bf16, which takes longer than the rest of the step on a CPU without bf16 units.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the matrices; the update of an entry has the size of one of AdamW at the same rate."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[torch.Tensor]] = {}
            for matrix in group["params"]:
                shapes.setdefault(matrix.shape, []).append(matrix)
            for shape, matrices in shapes.items():
                update = orthogonalize(torch.stack([self.momentum(matrix, group) for matrix in matrices]))
                for matrix, direction in zip(matrices, update, strict=True):
                    matrix.mul_(1 - group["lr"] * group["weight_decay"])
                    matrix.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(shape)))

    def momentum(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Accumulate the gradient of ``matrix`` and return it with Nesterov momentum."""
        assert matrix.grad is not None
        average = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        average.lerp_(matrix.grad, 1 - group["momentum"])
        return matrix.grad.lerp(average, group["momentum"])


def make_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    adam = torch.optim.AdamW(others, lr=args.lr_adam, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    return [Muon(matrices, lr=args.lr_muon), adam]


# --------------------------------------------------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Where a run stands; every random choice of a step follows from this and the seed."""

    step: int = 0
    stage: int = 0
    steps_in_stage: int = 0
    cooled: int = 0
    #: Running share of the questions answered rightly, by task.
    accuracy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(task.TASKS, 0.0))

    def update(self, right: dict[str, float], args: argparse.Namespace) -> None:
        """Count a step with its accuracies, and go to the next stage where the questions are answered."""
        self.step += 1
        self.steps_in_stage += 1
        if self.in_cooldown:
            self.cooled += 1
            return
        self.accuracy = {name: 0.9 * self.accuracy[name] + 0.1 * right[name] for name in task.TASKS}
        if self.steps_in_stage >= args.stage_steps and min(self.accuracy.values()) > args.threshold:
            log(f"step {self.step}: length {STAGES[self.stage]} done")
            self.stage += 1
            self.steps_in_stage = 0
            self.accuracy = dict.fromkeys(task.TASKS, 0.0)

    @property
    def in_cooldown(self) -> bool:
        """Whether all lengths are trained, and the rate goes to zero."""
        return self.stage >= len(STAGES)

    def length(self, args: argparse.Namespace) -> int:
        """Return the context length of the coming step: that of the stage, or any of the longer ones at the end."""
        if not self.in_cooldown:
            return STAGES[self.stage]
        shares = np.array(list(args.mixture.values()))
        return int(np.random.default_rng([args.seed, self.step]).choice(list(args.mixture), p=shares / shares.sum()))

    def rate(self, args: argparse.Namespace) -> float:
        """Return the factor of the learning rates: linear warm-up, constant, linear to zero in the cool-down."""
        return min(1.0, (self.step + 1) / args.warmup, 1.0 - self.cooled / args.cooldown)


def rows_and_questions(length: int, tokens: int) -> tuple[int, int]:
    """Return how many rows a step has, always both tasks, and how many questions a row."""
    questions = min(MAX_QUESTIONS, length // task.PAIR_TOKENS)
    return max(2, tokens // (length + task.PAIR_TOKENS * questions) // 2 * 2), questions


def row_positions(batch: task.Batch, generator: torch.Generator) -> torch.Tensor:
    """Return the positions ``[rows, n]``: in every other row the questions stand up to 4096 tokens farther away.

    So the distances of long contexts are learned in short ones.
    """
    rows, count = batch.ids.shape
    gaps = torch.randint(4096, (rows, 1), generator=generator) * torch.randint(2, (rows, 1), generator=generator)
    positions = torch.arange(count).repeat(rows, 1)
    positions[:, batch.context :] += gaps
    return positions


def train_step(
    model: LlamaForCausalLM, batch: task.Batch, args: argparse.Namespace, generator: torch.Generator
) -> tuple[dict[str, float], torch.Tensor]:
    """Accumulate the gradients of one batch; return the mean losses and which answers were right ``[rows, questions]``.

    The loss is that of the answers, and a little of some of the text, as attention should be that of a text model too.
    """
    positions = row_positions(batch, generator)
    chosen = batch.is_text & (torch.rand(batch.ids.shape, generator=generator) < args.text_share)
    counts = {"answer": int(batch.is_answer.sum()), "text": int(chosen.sum())}
    losses = dict.fromkeys(counts, 0.0)
    right = []
    micro = max(1, args.tokens // batch.ids.shape[1])
    for rows in torch.arange(len(batch.ids)).split(micro):
        states, targets = hidden_states(model, batch.ids[rows], positions[rows])[:, :-1], batch.ids[rows, 1:]
        total = torch.zeros(())
        for name, mask, weight in (("answer", batch.is_answer, 1.0), ("text", chosen, args.text_weight)):
            where = mask[rows, 1:]
            if not where.any():
                continue
            logits = model.lm_head(states[where])
            loss = cross_entropy(logits, targets[where], reduction="sum") / counts[name]
            total = total + weight * loss
            losses[name] += loss.item()
            if name == "answer":
                hits = logits.argmax(-1) == targets[where]
                right.append(hits.view(len(rows), -1, task.VALUE_TOKENS).all(-1))
        total.backward()
    return losses, torch.cat(right)


def save_state(path: Path, model: LlamaForCausalLM, optimizers: list[Any], progress: Progress) -> None:
    """Write the scratch checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "at": asdict(progress)}
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load_state(path: Path, model: LlamaForCausalLM, optimizers: list[Any]) -> Progress:
    """Read a scratch checkpoint into the model and the optimizers."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(**state["at"])


def train(args: argparse.Namespace, vocabulary: task.Vocabulary, text: np.ndarray) -> LlamaForCausalLM:
    """Train the model and return it; scratch checkpoints go to ``args.scratch``."""
    torch.manual_seed(args.seed)
    model = make_model()
    optimizers = make_optimizers(model, args)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    scratch = args.scratch / "state.pt"
    progress = Progress()
    if args.resume and scratch.exists():
        progress = load_state(scratch, model, optimizers)
        log(f"resumed at step {progress.step}")
    log(f"parameters: {sum(p.numel() for p in model.parameters())}, tokens of text: {len(text)}")
    began, meter = time.perf_counter(), Meter()
    while progress.cooled < args.cooldown:
        for optimizer, rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * progress.rate(args)
        length = progress.length(args)
        rows, questions = rows_and_questions(length, args.tokens)
        index = progress.step
        batch = task.training_batch(vocabulary, length, rows, questions, text=text, seed=args.seed, index=index)
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + index)
        losses, right = train_step(model, batch, args, generator)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        shares: dict[str, float] = {name: right[task.rows_of(name, index)].float().mean().item() for name in task.TASKS}
        meter.add({**losses, **shares})
        progress.update(shares, args)
        if progress.step % args.log_every == 0:
            log(f"step {progress.step} length {length} {meter.report()} ({time.perf_counter() - began:.0f} s)")
        if progress.step % args.checkpoint_every == 0 or progress.cooled == args.cooldown:
            save_state(scratch, model, optimizers, progress)
    return model.eval()


@dataclass
class Meter:
    """Means of the numbers of the last steps."""

    total: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, values: dict[str, float]) -> None:
        """Count the numbers of one step."""
        self.count += 1
        for name, value in values.items():
            self.total[name] = self.total.get(name, 0.0) + value

    def report(self) -> str:
        """Return the means as text, and begin anew."""
        line = " ".join(f"{name} {value / self.count:.3f}" for name, value in self.total.items())
        self.total, self.count = {}, 0
        return line


# --------------------------------------------------------------------------------------------------------------------
# Evaluation
# --------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answer(model: Any, examples: Sequence[task.Example]) -> torch.Tensor:
    """Return which questions are answered rightly, bool ``[examples, questions]``, by greedy decoding with a cache.

    The contexts are fed first, then question after question, each followed by the answer the model gave.
    """
    contexts = torch.from_numpy(np.stack([example.context for example in examples]))
    cache = model(input_ids=contexts, use_cache=True, logits_to_keep=1).past_key_values
    right = []
    for asked in zip(*(example.questions for example in examples), strict=True):
        fed = torch.from_numpy(np.stack([question.ids for question in asked]))
        given = []
        for _ in range(task.VALUE_TOKENS):
            logits = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            fed = logits[:, -1:].argmax(-1)
            given.append(fed)
        # The last token of an answer belongs in the cache as well, as it stood in training.
        model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
        wanted = torch.from_numpy(np.stack([question.answer for question in asked]))
        right.append((torch.cat(given, dim=1) == wanted).all(1))
    return torch.stack(right, dim=1)


def chunks(examples: Sequence[task.Example], size: int) -> Iterator[Sequence[task.Example]]:
    """Cut a set of examples into batches."""
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


def evaluate(out: Path, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return (and print) the accuracy of a stored checkpoint by task and length, with the full cache."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    vocabulary = task.Vocabulary.from_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, args.dtype)).eval()
    text = task.load_text(tokenizer)
    accuracy: dict[str, dict[str, float]] = {}
    for name in args.tasks:
        accuracy[name] = {}
        for length in task.LENGTHS:
            cell = task.evaluation_set(
                vocabulary, name, length, text=text, examples=args.examples, questions=args.questions
            )
            right = torch.cat([answer(model, part) for part in chunks(cell, 8)])
            accuracy[name][str(length)] = round(right.float().mean().item(), 4)
            log(f"{name} {length}: {int(right.sum())} of {right.numel()}")
    print(json.dumps({"dtype": args.dtype, "questions": args.examples * args.questions, "accuracy": accuracy}))
    return accuracy


# --------------------------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------------------------


def training_text(tokenizer: Any, cache: Path) -> np.ndarray:
    """Return the text of training as one stream of tokens: the calibration text and the training split of train.py."""
    if cache.exists():
        return np.load(cache).astype(np.int64)
    import train as stdlib

    texts = stdlib.build_texts()
    bundled = (task.TEXT_DIR / "calibration.txt").read_text(encoding="utf-8")
    ids = task.encode_text(tokenizer, bundled + texts["train"])
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.save(cache, ids.astype(np.int16))
    return ids


def parse_mixture(text: str) -> dict[int, float]:
    """Read ``length:weight,length:weight``."""
    return {int(length): float(weight) for length, weight in (part.split(":") for part in text.split(","))}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="model and tokenizer directory")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "recall-1m-training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=3072, help="about so many tokens in a step")
    parser.add_argument("--threshold", type=float, default=0.85, help="accuracy that ends a length")
    parser.add_argument("--stage-steps", type=int, default=20, help="least steps of a length")
    parser.add_argument("--cooldown", type=int, default=400, help="steps with all lengths, rate going to zero")
    parser.add_argument("--mixture", type=parse_mixture, default=MIXTURE, help="lengths of those steps, and weights")
    parser.add_argument("--warmup", type=int, default=50, help="warm-up steps")
    parser.add_argument("--lr-muon", type=float, default=2e-3)
    parser.add_argument("--lr-adam", type=float, default=1e-3)
    parser.add_argument("--text-share", type=float, default=0.25, help="share of the text tokens with a loss")
    parser.add_argument("--text-weight", type=float, default=0.2, help="weight of that loss")
    parser.add_argument("--threads", type=int, default=0, help="0: the default of torch")
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines of progress")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between scratch checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the last scratch checkpoint")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the stored checkpoint, then stop")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="arithmetic of --evaluate")
    parser.add_argument("--tasks", nargs="+", choices=task.TASKS, default=task.TASKS, help="tasks of --evaluate")
    parser.add_argument("--examples", type=int, default=32, help="contexts in a cell of --evaluate")
    parser.add_argument("--questions", type=int, default=8, help="questions about a context in --evaluate")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, or evaluate what is there."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.evaluate:
        tokenizer = AutoTokenizer.from_pretrained(SOURCE_DIR)
        text = training_text(tokenizer, args.scratch / "text.npy")
        model = train(args, task.Vocabulary.from_tokenizer(tokenizer), text)
        export(model, args.out)
    evaluate(args.out, args)


if __name__ == "__main__":
    main()
