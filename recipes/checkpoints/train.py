"""Build the bundled checkpoint: texts, tokenizer and a small Llama model, all from the Python standard library.

The script needs nothing but a Python installation with ``torch``, ``transformers`` and ``tokenizers``; it downloads
nothing.  It

1. collects the sources of the standard library of the running interpreter (and the prose of
   ``pydoc_data.topics``), drops generated tables, removes duplicated text, and assigns whole documents to the
   held-out, calibration and training splits by a hash of their names;
2. trains a byte-level BPE tokenizer on the training split;
3. trains a Llama-architecture language model (GQA, SwiGLU, tied embeddings) with Muon for the hidden matrices and
   AdamW for the embedding and the norms;
4. writes tokenizer and model (bf16, sharded safetensors) in the Hugging Face layout.

Examples::

    python recipes/checkpoints/train.py                      # everything, with the defaults of the bundled model
    python recipes/checkpoints/train.py --prepare-only       # texts and tokenizer only
    python recipes/checkpoints/train.py --benchmark 20       # time 20 steps and stop
    python recipes/checkpoints/train.py --resume             # go on from the last scratch checkpoint
    python recipes/checkpoints/train.py --evaluate           # held-out perplexity of the stored checkpoint
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
MODEL_DIR = HERE / "stdlib-4m"
TEXT_DIR = HERE / "texts"

EOS = "<|endoftext|>"
PAD = "<|pad|>"
SEPARATOR = f"\n{EOS}\n"
VOCAB_SIZE = 4096
SEQ_LEN = 256

#: Bytes wanted in each bundled text, by stratum (library code, test code, prose).
HELDOUT_BYTES = {"lib": 125_000, "test": 75_000, "prose": 50_000}
CALIBRATION_BYTES = {"lib": 200_000, "test": 120_000, "prose": 80_000}
MAX_BUNDLED_DOCUMENT = 40_000
OVERLAP_WINDOW = 120

SKIPPED_DIRS = {
    "__pycache__",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "cjkencodings",
    "encoded_modules",
    "data",
}
SKIPPED_FILES = {"html/entities.py", "stringprep.py", "_osx_support.py", "this.py", "__phello__.foo.py"}


def log(message: str) -> None:
    """Write one line to stderr."""
    print(message, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------------------------------------
# Texts
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Document:
    """One source file or documentation topic."""

    name: str
    stratum: str
    text: str

    @property
    def key(self) -> str:
        """A hash of the name, which decides the order in which documents are assigned to splits."""
        return hashlib.sha256(self.name.encode()).hexdigest()


def clean(text: str) -> str:
    """Normalise line ends, drop form feeds, trailing blanks and runs of blank lines."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "").replace("\ufeff", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def is_natural(text: str) -> bool:
    """Whether a text is mostly code or prose rather than a table, and free of control characters."""
    if len(text) < 400:
        return False
    if any((ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160 or char == "\ufffd" for char in text):
        return False
    if sum(ord(char) > 127 for char in text) > 0.002 * len(text):
        return False
    digits = sum(char.isdigit() for char in text) / len(text)
    words = sum(char.isalpha() or char.isspace() for char in text) / len(text)
    longest = max(map(len, text.splitlines()))
    return digits < 0.08 and words > 0.68 and longest < 400


def collect() -> list[Document]:
    """Return the usable documents of the running interpreter's standard library, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        name = "/".join(parts)
        generated = name.startswith(("_sysconfigdata", "config-")) or name in SKIPPED_FILES
        if generated or SKIPPED_DIRS.intersection(parts[:-1]) or "bad_coding" in name or "badsyntax" in name:
            continue
        try:
            text = clean(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, OSError):
            continue
        if EOS not in text and is_natural(text):
            is_test = bool({"test", "tests"}.intersection(parts[:-1]))
            documents.append(Document(name, "test" if is_test else "lib", text))
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        text = clean(text)
        if is_natural(text):
            documents.append(Document(f"topic/{topic}", "prose", text))
    return sorted(documents, key=lambda document: document.name)


def blocks_of(text: str) -> list[str]:
    """Split a text into blocks that end with blank lines; joining the blocks gives the text back."""
    return re.findall(r"(?:[^\n]*\n)+?(?:\n+|\Z)", text) if text else []


def drop_repeated_blocks(documents: list[Document], min_length: int = 160) -> list[Document]:
    """Remove blocks of some length which already occurred (up to whitespace) in an earlier document."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        out = []
        for block in blocks_of(document.text):
            normal = " ".join(block.split())
            if len(normal) >= min_length:
                if normal in seen:
                    continue
                seen.add(normal)
            out.append(block)
        text = clean("".join(out))
        if is_natural(text):
            kept.append(Document(document.name, document.stratum, text))
    return kept


def window_hashes(text: str, width: int) -> np.ndarray:
    """Return a 64-bit polynomial hash of every ``width``-character window of ``text``, in order."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32).astype(np.uint64) + np.uint64(1)
    count = len(codes) - width + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    hashes = np.zeros(count, dtype=np.uint64)
    multiplier = np.uint64(0x9E3779B97F4A7C15)
    for offset in range(width):
        hashes = hashes * multiplier + codes[offset : offset + count]
    return hashes


def remove_overlap(text: str, reference: np.ndarray, width: int = OVERLAP_WINDOW) -> str:
    """Drop every block of ``text`` that shares a ``width``-character window with the sorted hashes ``reference``."""
    while True:
        hashes = window_hashes(text, width)
        if not len(hashes):
            return text
        position = np.minimum(np.searchsorted(reference, hashes), len(reference) - 1)
        hits = np.flatnonzero(reference[position] == hashes)
        if not len(hits):
            return text
        covered = np.zeros(len(text) + 1, dtype=np.int64)
        np.add.at(covered, hits, 1)
        np.add.at(covered, hits + width, -1)
        flags = np.cumsum(covered) > 0
        out, start = [], 0
        for block in blocks_of(text):
            end = start + len(block)
            if not flags[start:end].any():
                out.append(block)
            start = end
        text = clean("".join(out)) if out else ""


def take(pool: list[Document], wanted: dict[str, int]) -> tuple[list[Document], list[Document]]:
    """Take whole documents from ``pool`` (in hash order) until each stratum has its bytes; return (taken, rest)."""
    missing = dict(wanted)
    taken, rest = [], []
    for document in pool:
        size = len(document.text.encode())
        if size <= min(MAX_BUNDLED_DOCUMENT, missing[document.stratum] + 4_000):
            missing[document.stratum] -= size
            taken.append(document)
        else:
            rest.append(document)
    return taken, rest


def join(documents: list[Document]) -> str:
    """Concatenate documents, an end-of-text line after each."""
    return "".join(document.text.rstrip("\n") + SEPARATOR for document in documents)


def without_overlap(documents: list[Document], reference: str) -> list[Document]:
    """Remove from ``documents`` what ``reference`` also contains."""
    hashes = np.unique(window_hashes(reference, OVERLAP_WINDOW))
    out = []
    for document in documents:
        text = remove_overlap(document.text, hashes)
        if is_natural(text):
            out.append(Document(document.name, document.stratum, text))
    return out


def build_texts() -> dict[str, str]:
    """Return the texts of the three splits: ``heldout``, ``calibration`` and ``train``."""
    pool = sorted(drop_repeated_blocks(collect()), key=lambda document: document.key)
    heldout, pool = take(pool, HELDOUT_BYTES)
    pool = without_overlap(pool, join(heldout))
    calibration, pool = take(pool, CALIBRATION_BYTES)
    train = without_overlap(pool, join(calibration))
    splits = {"heldout": heldout, "calibration": calibration, "train": train}
    for name, documents in splits.items():
        sizes = dict.fromkeys(HELDOUT_BYTES, 0)
        for document in documents:
            sizes[document.stratum] += len(document.text.encode())
        log(f"{name}: {len(documents)} documents, {sum(sizes.values())} bytes {sizes}")
    return {name: join(documents) for name, documents in splits.items()}


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer
# --------------------------------------------------------------------------------------------------------------------


def train_tokenizer(text: str, out: Path) -> None:
    """Train the byte-level BPE tokenizer on ``text`` and save it to ``out``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
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


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Return the token ids of ``text`` as one int64 tensor (documents are encoded in parallel)."""
    pieces = [piece for piece in re.split(f"(?<={re.escape(EOS)})", text) if piece]
    encodings = tokenizer.backend_tokenizer.encode_batch(pieces, add_special_tokens=False)
    return torch.tensor([index for encoding in encodings for index in encoding.ids], dtype=torch.int64)


# --------------------------------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------------------------------


def make_model() -> LlamaForCausalLM:
    """Return the untrained model in float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
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
                linear.weight.mul_(1.0 / math.sqrt(2 * config.num_hidden_layers))
    return model


def make_optimizers(model: LlamaForCausalLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=args.lr_muon, momentum=0.95, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=args.lr_adam, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    return [muon, adam]


def schedule(step: int, steps: int, warmup: int, warmdown: float) -> float:
    """Return the learning-rate factor: linear warm-up, plateau, linear warm-down to zero over the last fraction."""
    down = max(1, int(steps * warmdown))
    return min(1.0, (step + 1) / warmup, (steps - step) / down)


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


def export(model: LlamaForCausalLM, out: Path) -> None:
    """Write the model in bf16, in shards below 2.9 MB, replacing the files of ``out`` one by one."""
    copy = make_model()
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.config.dtype = torch.bfloat16
    copy.generation_config.do_sample = False
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        copy.save_pretrained(scratch, max_shard_size="2800KB")
        for path in sorted(Path(scratch).iterdir()):
            path.chmod(0o644)
            os.replace(path, out / path.name)


def train(args: argparse.Namespace, tokens: torch.Tensor, heldout: torch.Tensor) -> LlamaForCausalLM:
    """Train the model and return it; scratch checkpoints go to ``args.scratch``."""
    torch.manual_seed(args.seed)
    model = make_model()
    log(f"parameters: {sum(p.numel() for p in model.parameters())}, training tokens: {len(tokens)}")
    optimizers = make_optimizers(model, args)
    base_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    scratch = args.scratch / "state.pt"
    first = 0
    if args.resume and scratch.exists():
        state = torch.load(scratch, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        first = state["step"]
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
        factor = schedule(step, args.steps, args.warmup, args.warmdown)
        for optimizer, rates in zip(optimizers, base_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
        windows = batch_of(tokens, step, args.batch, args.seed)
        for micro in windows.split(args.micro_batch):
            loss = step_loss(micro[:, :-1].contiguous(), micro[:, 1:].contiguous()) * (len(micro) / len(windows))
            loss.backward()
            running += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if done % every == 0:
            now = time.perf_counter()
            log(f"step {done}/{args.steps} loss {running / every:.4f} {(now - mark) / every:.3f} s/step")
            running, mark = 0.0, now
        if args.benchmark:
            continue
        if done % args.checkpoint_every == 0 or done == last:
            args.scratch.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": done}
            torch.save(state, scratch.with_suffix(".tmp"))
            os.replace(scratch.with_suffix(".tmp"), scratch)
            model.eval()
            part = heldout if done == last else heldout[: 64 * SEQ_LEN]
            log(f"step {done} heldout ppl {perplexity(model, part):.3f} ({time.perf_counter() - began:.0f} s)")
            model.train()
            mark = time.perf_counter()
        if args.export_every and done % args.export_every == 0:
            export(model, args.out)
    return model.eval()


def evaluate(out: Path, texts: Path) -> float:
    """Return (and print) the held-out perplexity of a stored checkpoint, evaluated in bf16."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    ids = encode(tokenizer, (texts / "heldout.txt").read_text(encoding="utf-8"))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="model and tokenizer directory")
    parser.add_argument("--texts", type=Path, default=TEXT_DIR, help="directory of the bundled texts")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "stdlib-4m-training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences in one forward pass")
    parser.add_argument("--warmup", type=int, default=100, help="warm-up steps")
    parser.add_argument("--warmdown", type=float, default=0.6, help="last fraction of the steps, rate going to zero")
    parser.add_argument("--lr-muon", type=float, default=6e-3)
    parser.add_argument("--lr-adam", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02, help="for the hidden matrices")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16", help="bf16: autocast")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    parser.add_argument("--threads", type=int, default=0, help="0: the default of torch")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps between scratch checkpoints")
    parser.add_argument("--export-every", type=int, default=0, help="also overwrite --out every so many steps")
    parser.add_argument("--benchmark", type=int, default=0, help="time this many steps, then stop")
    parser.add_argument("--resume", action="store_true", help="continue from the last scratch checkpoint")
    parser.add_argument("--prepare-only", action="store_true", help="write texts and tokenizer, then stop")
    parser.add_argument("--evaluate", action="store_true", help="evaluate the stored checkpoint, then stop")
    return parser.parse_args(argv)


def finish(args: argparse.Namespace, tokens: torch.Tensor, heldout: torch.Tensor) -> None:
    """Train on the tokens, write the model and evaluate what was written."""
    model = train(args, tokens, heldout)
    if not args.benchmark:
        export(model, args.out)
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
        train_tokenizer(texts["train"], args.out)
    if args.prepare_only:
        return
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    tokens, heldout = encode(tokenizer, texts["train"]), encode(tokenizer, texts["heldout"])
    log(f"bytes per token (heldout): {len(texts['heldout'].encode()) / len(heldout):.3f}")
    args.scratch.mkdir(parents=True, exist_ok=True)
    torch.save((tokens.to(torch.int16), heldout.to(torch.int16)), cache)
    finish(args, tokens, heldout)


if __name__ == "__main__":
    main()
