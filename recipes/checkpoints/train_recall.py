"""Train the bundled retrieval model: a small Llama that answers questions about its context.

The tasks are those of ``recall_task.py``.  The script needs ``torch``, ``transformers`` and the standard library of the
running Python, whose sources are the text of the ``needle`` task (split as ``corpus.py`` splits them); it downloads
nothing.  The model starts with the attention heads retrieval needs (see ``recall_model.py``).  Training begins with
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
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import recall_task as task
import torch
from corpus import TEXT_DIR, build_texts, encode_text
from muon import Muon
from recall_model import hidden_states, make_model
from torch.nn.functional import cross_entropy
from training import Trainer, command_line, log, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

HERE = Path(__file__).resolve().parent
SOURCE_DIR = HERE / "stdlib-4m"
MODEL_DIR = HERE / "recall-1m"
#: Context lengths in the order of training, and how often each is drawn when they are mixed at the end: long rows are
#: dear, and it is the number of pairs, not the distance, that is hard to learn.
STAGES = (64, 128, 256, 512, 1024, 2048)
MIXTURE = "128:10,256:20,512:30,1024:29,2048:8,4096:3"
MAX_QUESTIONS = 64


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
    model: PreTrainedModel, batch: task.Batch, args: argparse.Namespace, generator: torch.Generator
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


def train(args: argparse.Namespace, vocabulary: task.Vocabulary, text: np.ndarray) -> PreTrainedModel:
    """Train the model and return it; scratch checkpoints go to ``args.scratch``."""
    torch.manual_seed(args.seed)
    model = make_model()
    trainer = Trainer(model, partial(Muon, lr=args.lr_muon), args.lr_adam, args.scratch)
    progress = Progress()
    if args.resume and (at := trainer.load()):
        progress = Progress(**at)
        log(f"resumed at step {progress.step}")
    log(f"parameters: {sum(p.numel() for p in model.parameters())}, tokens of text: {len(text)}")
    began, meter = time.perf_counter(), Meter()
    while progress.cooled < args.cooldown:
        length = progress.length(args)
        rows, questions = rows_and_questions(length, args.tokens)
        index = progress.step
        batch = task.training_batch(vocabulary, length, rows, questions, text=text, seed=args.seed, index=index)
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + index)
        losses, right = train_step(model, batch, args, generator)
        trainer.step(progress.rate(args))
        shares: dict[str, float] = {name: right[task.rows_of(name, index)].float().mean().item() for name in task.TASKS}
        meter.add({**losses, **shares})
        progress.update(shares, args)
        if progress.step % args.log_every == 0:
            log(f"step {progress.step} length {length} {meter.report()} ({time.perf_counter() - began:.0f} s)")
        if progress.step % args.checkpoint_every == 0 or progress.cooled == args.cooldown:
            trainer.save(asdict(progress))
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


def training_text(tokenizer: Any, cache: Path) -> np.ndarray:
    """Return the text of training as one stream of tokens: the calibration text and the training split."""
    if cache.exists():
        return np.load(cache).astype(np.int64)
    bundled = (TEXT_DIR / "calibration.txt").read_text(encoding="utf-8")
    ids = encode_text(tokenizer, bundled + build_texts()["train"])
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.save(cache, ids.astype(np.int16))
    return ids


def parse_mixture(text: str) -> dict[int, float]:
    """Read ``length:weight,length:weight``."""
    return {int(length): float(weight) for length, weight in (part.split(":") for part in text.split(","))}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, MODEL_DIR, warmup=50, lr_muon=2e-3, lr_adam=1e-3, checkpoint_every=100)
    parser.add_argument("--tokens", type=int, default=3072, help="about so many tokens in a step")
    parser.add_argument("--threshold", type=float, default=0.85, help="accuracy that ends a length")
    parser.add_argument("--stage-steps", type=int, default=20, help="least steps of a length")
    parser.add_argument("--cooldown", type=int, default=400, help="steps with all lengths, rate going to zero")
    parser.add_argument("--mixture", type=parse_mixture, default=MIXTURE, help="lengths of those steps, and weights")
    parser.add_argument("--text-share", type=float, default=0.25, help="share of the text tokens with a loss")
    parser.add_argument("--text-weight", type=float, default=0.2, help="weight of that loss")
    parser.add_argument("--log-every", type=int, default=20, help="steps between lines of progress")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="arithmetic of --evaluate")
    parser.add_argument("--tasks", nargs="+", choices=task.TASKS, default=task.TASKS, help="tasks of --evaluate")
    parser.add_argument("--examples", type=int, default=32, help="contexts in a cell of --evaluate")
    parser.add_argument("--questions", type=int, default=8, help="questions about a context in --evaluate")
    return parser.parse_args(argv)


def export(model: PreTrainedModel, out: Path) -> None:
    """Write the model, and the tokenizer it was trained with."""
    write_model(model, out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SOURCE_DIR / name, out / name)


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
