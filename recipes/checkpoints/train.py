"""Build the bundled language models: texts, tokenizers and weights, all from the Python standard library.

The script needs nothing but a Python installation with ``torch``, ``transformers`` and ``tokenizers``; it downloads
nothing.  It

1. collects the texts of the standard library of the running interpreter and splits them (``corpus.py``);
2. trains a byte-level BPE tokenizer on the training split;
3. trains a language model (``MODELS``: a Llama or a Qwen3) with Muon for the hidden matrices and AdamW for the embedding
   and the norms;
4. writes tokenizer and model (bf16, sharded safetensors) in the Hugging Face layout.

Examples::

    python recipes/checkpoints/train.py                      # everything, with the defaults of the bundled model
    python recipes/checkpoints/train.py --model stdlib-qwen3-4m --precision fp32      # the second model
    python recipes/checkpoints/train.py --prepare-only       # texts and tokenizer only
    python recipes/checkpoints/train.py --benchmark 20       # time 20 steps and stop
    python recipes/checkpoints/train.py --resume             # go on from the last scratch checkpoint
    python recipes/checkpoints/train.py --evaluate           # held-out perplexity of the stored checkpoint
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sysconfig
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import EOS, SEPARATOR, TEXT_DIR, build_texts, encode_text
from muon import Muon
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from training import VOCAB_SIZE, Trainer, command_line, log, make_model, write_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

HERE = Path(__file__).resolve().parent
PAD = "<|pad|>"
SEQ_LEN = 256
SHARD_SIZE = "2800KB"
#: How Qwen2 and its successors cut text into words: digits one by one, and a word takes the sign before it along.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class BundledModel:
    """A model that this script builds.

    Attributes:
        config_class: of its family.
        sizes: of its configuration; the vocabulary counts the two special tokens.
        steps: steps of training.
        words: the regular expression that cuts text into words; None: GPT-2's.
    """

    config_class: type[PreTrainedConfig]
    sizes: dict[str, int]
    steps: int
    words: str | None = None

    def make(self) -> PreTrainedModel:
        """Return the untrained model in float32."""
        return make_model(self.config_class, rope_theta=10_000.0, max_position_embeddings=1024, **self.sizes)


MODELS = {
    "stdlib-4m": BundledModel(
        LlamaConfig,
        {
            "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        steps=2800,
    ),
    "stdlib-qwen3-4m": BundledModel(
        Qwen3Config,
        {
            "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 4,
        },
        steps=800,
        words=QWEN_WORDS,
    ),
}  # fmt: skip


def train_tokenizer(text: str, out: Path, bundled: BundledModel) -> None:
    """Train the byte-level BPE tokenizer of a model on ``text`` and save it to ``out``."""
    tokenizer = Tokenizer(models.BPE())
    if bundled.words is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        words = pre_tokenizers.Split(Regex(bundled.words), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=bundled.sizes["vocab_size"],
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(SEPARATOR), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(out)


def make_muon(args: argparse.Namespace, matrices: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of the hidden matrices, in the precision of the run."""
    if args.precision == "fp32":
        return Muon(matrices, lr=args.lr_muon, weight_decay=args.weight_decay)
    return torch.optim.Muon(
        matrices, lr=args.lr_muon, momentum=0.95, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
    )


def schedule(step: int, steps: int, warmup: int, warmdown: float) -> float:
    """Return the learning-rate factor: linear warm-up, plateau, linear warm-down to zero over the last fraction."""
    down = max(1, int(steps * warmdown))
    return min(1.0, (step + 1) / warmup, (steps - step) / down)


def tokens_of(tokenizer: Any, text: str) -> torch.Tensor:
    """Return the token ids of ``text`` as one int64 tensor."""
    return torch.from_numpy(encode_text(tokenizer, text))


def batch_of(tokens: torch.Tensor, step: int, batch: int, seed: int) -> torch.Tensor:
    """Return the ``batch`` windows of step ``step``: each epoch visits shifted windows in a new random order."""
    per_epoch = (len(tokens) - 2 * SEQ_LEN) // SEQ_LEN // batch
    epoch, index = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shift = int(torch.randint(SEQ_LEN, (1,), generator=generator))
    order = torch.randperm(per_epoch * batch, generator=generator)[index * batch : (index + 1) * batch]
    return torch.stack([tokens[s : s + SEQ_LEN + 1] for s in (order * SEQ_LEN + shift).tolist()])


def perplexity(model: Any, ids: torch.Tensor, length: int = SEQ_LEN, batch: int = 16) -> float:
    """Return the perplexity over non-overlapping windows; every token but the first of each window is scored."""
    windows = ids[: len(ids) // length * length].view(-1, length)
    total, count = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(windows), batch):
            inputs = windows[start : start + batch]
            logits = model(input_ids=inputs, use_cache=False).logits[:, :-1].float()
            targets = inputs[:, 1:].reshape(-1)
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum").item()
            count += targets.numel()
    return math.exp(total / count)


def train(args: argparse.Namespace, tokens: torch.Tensor, heldout: torch.Tensor) -> PreTrainedModel:
    """Train the model and return it; scratch checkpoints go to ``args.scratch``."""
    torch.manual_seed(args.seed)
    model = MODELS[args.model].make()
    log(f"parameters: {sum(p.numel() for p in model.parameters())}, training tokens: {len(tokens)}")
    trainer = Trainer(model, partial(make_muon, args), args.lr_adam, args.scratch)
    first = 0
    if args.resume and (at := trainer.load()):
        first = at["step"]
        log(f"resumed at step {first}")

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            logits = model(input_ids=inputs, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    step_loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    last = args.benchmark if args.benchmark else args.steps
    running, began, mark = 0.0, time.perf_counter(), time.perf_counter()
    every = 5 if args.benchmark else 50
    for step in range(first, last):
        windows = batch_of(tokens, step, args.batch, args.seed)
        for micro in windows.split(args.micro_batch):
            loss = step_loss(micro[:, :-1].contiguous(), micro[:, 1:].contiguous()) * (len(micro) / len(windows))
            loss.backward()
            running += loss.item()
        trainer.step(schedule(step, args.steps, args.warmup, args.warmdown))
        done = step + 1
        if done % every == 0:
            now = time.perf_counter()
            log(f"step {done}/{args.steps} loss {running / every:.4f} {(now - mark) / every:.3f} s/step")
            running, mark = 0.0, now
        if args.benchmark:
            continue
        if done % args.checkpoint_every == 0 or done == last:
            trainer.save({"step": done})
            model.eval()
            part = heldout if done == last else heldout[: 64 * SEQ_LEN]
            log(f"step {done} heldout ppl {perplexity(model, part):.3f} ({time.perf_counter() - began:.0f} s)")
            model.train()
            mark = time.perf_counter()
        if args.export_every and done % args.export_every == 0:
            write_model(model, args.out, max_shard_size=SHARD_SIZE)
    return model.eval()


def evaluate(out: Path, texts: Path) -> float:
    """Return (and print) the held-out perplexity of a stored checkpoint, evaluated in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    ids = tokens_of(tokenizer, (texts / "heldout.txt").read_text(encoding="utf-8"))
    value = perplexity(model, ids)
    result = {
        "heldout_ppl": round(value, 4),
        "tokens": len(ids),
        "windows": len(ids) // SEQ_LEN,
        "sequence_length": SEQ_LEN,
        "dtype": "bfloat16",
    }
    print(json.dumps(result))
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument(
        "--model", choices=list(MODELS), default="stdlib-4m", help="which of the two (default: the Llama)"
    )
    name = choice.parse_known_args(argv)[0].model
    parser = command_line(__doc__, HERE / name, [choice], warmup=100, lr_muon=6e-3, lr_adam=3e-3, checkpoint_every=250)
    parser.add_argument("--texts", type=Path, default=TEXT_DIR, help="directory of the bundled texts")
    parser.add_argument("--steps", type=int, default=MODELS[name].steps)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences in one forward pass")
    parser.add_argument("--warmdown", type=float, default=0.6, help="last fraction of the steps, rate going to zero")
    parser.add_argument("--weight-decay", type=float, default=0.02, help="for the hidden matrices")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16: autocast; fp32: Muon too")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    parser.add_argument("--export-every", type=int, default=0, help="also overwrite --out every so many steps")
    parser.add_argument("--benchmark", type=int, default=0, help="time this many steps, then stop")
    parser.add_argument("--prepare-only", action="store_true", help="write texts and tokenizer, then stop")
    return parser.parse_args(argv)


def finish(args: argparse.Namespace, tokens: torch.Tensor, heldout: torch.Tensor) -> None:
    """Train on the tokens, write the model and evaluate what was written."""
    model = train(args, tokens, heldout)
    if not args.benchmark:
        write_model(model, args.out, max_shard_size=SHARD_SIZE)
        evaluate(args.out, args.texts)


def main(argv: list[str] | None = None) -> None:
    """Run the requested stages."""
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.evaluate:
        evaluate(args.out, args.texts)
        return
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    cache = args.scratch / "tokens.pt"
    if args.resume and cache.exists():
        tokens, heldout = torch.load(cache, weights_only=True)
        finish(args, tokens.long(), heldout.long())
        return
    texts = build_texts()
    if not (args.resume or args.benchmark):
        args.texts.mkdir(parents=True, exist_ok=True)
        for name in ("calibration", "heldout"):
            (args.texts / f"{name}.txt").write_text(texts[name], encoding="utf-8", newline="\n")
        licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
        if licence.exists():
            shutil.copyfile(licence, args.texts.parent / "LICENSE-PSF.txt")
        train_tokenizer(texts["train"], args.out, MODELS[args.model])
    if args.prepare_only:
        return
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    tokens, heldout = tokens_of(tokenizer, texts["train"]), tokens_of(tokenizer, texts["heldout"])
    log(f"bytes per token (heldout): {len(texts['heldout'].encode()) / len(heldout):.3f}")
    args.scratch.mkdir(parents=True, exist_ok=True)
    torch.save((tokens.to(torch.int16), heldout.to(torch.int16)), cache)
    finish(args, tokens, heldout)


if __name__ == "__main__":
    main()
