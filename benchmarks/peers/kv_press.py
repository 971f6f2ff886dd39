"""NVIDIA's kvpress on given prompts, models and budgets: answers that stay right, likelihood of what follows, cache bytes.

    kv_press.py JOB.json OUT.json

Run by the Python of `setup_kv.sh`. The job:

    {"model": directory, "dtype": "float32", "threads": 2, "seed": 0, "query_aware": false, "masking": "exact",
     "items": [{"id": ..., "context": [ids], "questions": [{"ids": [...], "answer": [...]}]}],
     "texts": [{"id": ..., "ids": [...], "prompt": n}],
     "steps": [{"id": ..., "ids": [...], "prompt": n}],
     "gates": [[...]],
     "methods": [{"name": "snapkv", "press": "SnapKVPress", "options": {...}}],
     "budgets": [0.5, 0.25]}

An option that is itself `{"press": ..., "options": ...}`, or a list of such, is a press within the press. Without
"methods", every press that needs nothing but the model runs (`DEFAULT_METHODS`), and DuoAttention on the job's gates, `[layer][key
head]`, if it has any, with heads streaming as they do in ours, whatever the budget (null then). A budget is the share of the prefilled
tokens that stays: `compression_ratio = 1 - budget`.

An item is prefilled under the press; every question then starts from a copy of that cache, at the position after the last
token of the context, as in kvpress's own pipeline. With `query_aware` the question ends the prefilled text, and the first
token of the answer comes out of the prefill, before anything is evicted. A text is prefilled up to `prompt`; its
likelihood is that of the tokens after the first one of the rest, read in one forward pass, so that the compressed cache is
what every one of them is predicted from. Steps are texts whose rest is decoded token by token, under the presses that
compress while decoding (`DECODING_METHODS`), every `INTERVAL` steps, to the budget's share of the whole text.

Presses that evict per head only mark entries, and kvpress then writes keys into them that the queries at hand turn away
from. `"masking": "exact"` gives those entries a weight of zero instead, which is what the eviction means; `"fake keys"`
leaves them to kvpress, and falls back to the mask where it finds no such keys.

The output is `{"kvpress": version, "transformers": version, "torch": version, "job": what was asked, "rows": [...]}`, a
row for each method, budget and item or text. `cache_bytes` are the bytes of the tensors in the cache after compression,
`nominal_bytes` those that would remain if marked entries and zeroed channels were freed, `full_bytes` those without a press.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvpress
import numpy
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

#: Queries that FINCH scores with when no question ends the prefilled text: the window of its relative SnapKV.
FINCH_WINDOW = 64
NO_FAKE_KEYS = "Could not find fake keys"


def spec(kind: str, **options: Any) -> dict[str, Any]:
    """A press as a job names it."""
    return {"press": kind, "options": options}


def method(name: str, kind: str, **options: Any) -> dict[str, Any]:
    """A method as a job names it."""
    return {"name": name, **spec(kind, **options)}


# Left out: presses that need files from the Hub for the very model (QFilter, KVzap, FastKVzip, RestoreKV, LUKV,
# ExpectedAttentionStats), or a data set (DuoAttention's own gates: it gets ours); those without a budget to set (DMS,
# SimLayerKV); those that compress while decoding (Decoding, CompressionRatioDecoding, PrefillDecoding, CAM); KVCompose
# with structured=False, which leaves the repeated context in the cache. The variants with a window of 16 and with a lag
# of 32 are there because what is always kept, 64 tokens or up to 256, would be the whole budget of a short context.
DEFAULT_METHODS: list[dict[str, Any]] = [
    method("random", "RandomPress"),
    method("streaming_llm", "StreamingLLMPress"),
    method("streaming_llm_rerotated", "KeyRerotationPress", press=spec("StreamingLLMPress")),
    method("knorm", "KnormPress"),
    method("keydiff", "KeyDiffPress"),
    method("block_keydiff", "BlockPress", press=spec("KeyDiffPress")),
    method("lagkv", "LagKVPress"),
    method("lagkv_lag32", "LagKVPress", lag_size=32),
    method("cur", "CURPress"),
    method("leverage", "LeverageScorePress"),
    method("non_causal", "NonCausalAttnPress"),
    method("compactor", "CompactorPress"),
    method("capkv", "CapPress"),
    method("tova", "TOVAPress"),
    method("observed_attention", "ObservedAttentionPress"),
    method("expected_attention", "ExpectedAttentionPress"),
    method("snapkv", "SnapKVPress"),
    method("snapkv_w16", "SnapKVPress", window_size=16),
    method("pyramidkv", "PyramidKVPress"),
    method("pyramidkv_w16", "PyramidKVPress", window_size=16),
    method("chunk_expected_attention", "ChunkPress", press=spec("ExpectedAttentionPress"), chunk_length=256),
    method("chunkkv_snapkv_w16", "ChunkKVPress", press=spec("SnapKVPress", window_size=16)),
    method("entropy_gated_chunkkv_w16", "EntropyGatedChunkKVPress", press=spec("SnapKVPress", window_size=16)),
    method("merging_snapkv_w16", "MergingPress", press=spec("SnapKVPress", window_size=16)),
    method(
        "think_snapkv_w16",
        "ComposedPress",
        presses=[spec("SnapKVPress", window_size=16), spec("ThinKPress", key_channel_compression_ratio=0.5)],
    ),
    method("adakv_snapkv", "AdaKVPress", press=spec("SnapKVPress")),
    method("adakv_snapkv_w16", "AdaKVPress", press=spec("SnapKVPress", window_size=16)),
    method("adakv_expected_attention", "AdaKVPress", press=spec("ExpectedAttentionPress", epsilon=1e-2)),
    method("adakv_compactor", "AdaKVPress", press=spec("CompactorPress")),
    method("criticalkv_snapkv_w16", "CriticalKVPress", press=spec("SnapKVPress", window_size=16)),
    method("criticalkv_expected_attention", "CriticalKVPress", press=spec("ExpectedAttentionPress", use_vnorm=False)),
    method("critical_adakv_snapkv_w16", "CriticalAdaKVPress", press=spec("SnapKVPress", window_size=16)),
    method(
        "critical_adakv_expected_attention",
        "CriticalAdaKVPress",
        press=spec("ExpectedAttentionPress", use_vnorm=False),
    ),
    method("finch", "FinchPress"),
    method("kvcompose", "KVComposePress"),
    method("kvzip", "KVzipPress"),
    method("kvzip_layerwise", "KVzipPress", layerwise=True),
    method("kvzip_plus", "KVzipPress", kvzip_plus_normalization=True),
    method("kvgrad", "KVgradPress"),
]
#: Steps between two compressions while decoding.
INTERVAL = 32
DECODING_METHODS: list[dict[str, Any]] = [
    method("decoding_streaming_llm", "StreamingLLMPress"),
    method("decoding_knorm", "KnormPress"),
    method("decoding_keydiff", "KeyDiffPress"),
    method("decoding_tova", "TOVAPress"),
    method("decoding_expected_attention", "ExpectedAttentionPress"),
    method("decoding_snapkv_w16", "SnapKVPress", window_size=16),
    method("decoding_adakv_snapkv_w16", "AdaKVPress", press=spec("SnapKVPress", window_size=16)),
]
#: Shares of heads that stream.
DUO_METHODS: list[dict[str, Any]] = [
    {**method(f"duo_attention_{name}", "DuoAttentionPress", head_compression_ratio=share), "fixed": True}
    for name, share in (("3_of_6", 0.5), ("5_of_6", 5 / 6))
]
#: Of a streaming head, as ours.
DUO_SINKS, DUO_RECENT = 4, 28
FULL: dict[str, Any] = {"name": "full", "press": None}


def build(wanted: Any) -> Any:
    """The press of a specification, or the option itself."""
    if isinstance(wanted, list):
        return [build(one) for one in wanted]
    if isinstance(wanted, dict) and "press" in wanted:
        options = {name: build(value) for name, value in wanted.get("options", {}).items()}
        return getattr(kvpress, wanted["press"])(**options)
    return wanted


def give_gates(gates: list[list[float]]) -> None:
    """Let DuoAttention find these instead of files of the Hub."""
    found = DUO_SINKS, DUO_RECENT, numpy.array(gates)
    kvpress.DuoAttentionPress.load_attention_pattern = staticmethod(lambda model: found)


def parts(press: Any) -> Iterator[Any]:
    """A press and those within it."""
    yield press
    for within in [*getattr(press, "presses", []), getattr(press, "press", None)]:
        if within is not None:
            yield from parts(within)


def press_of(wanted: dict[str, Any], budget: float | None) -> Any:
    """The press that keeps `budget` (None: what it keeps by itself), or None for the cache as it is."""
    if wanted["press"] is None:
        return None
    press = build(wanted)
    if budget is None:
        return press
    if not isinstance(press, kvpress.ComposedPress):
        # Only looked up, not read: some presses know their ratio after a prompt, and raise before.
        if "compression_ratio" not in dir(press):
            raise ValueError(f"{type(press).__name__} has no compression ratio to set")
        press.compression_ratio = 1 - budget
        return press
    channels = [one for one in press.presses if isinstance(one, kvpress.ThinKPress)]
    tokens = [one for one in press.presses if one not in channels]
    if len(tokens) != 1:
        raise ValueError("a composition is given its budget through the one press that evicts tokens")
    share = budget / math.prod(1 - one.compression_ratio for one in channels)
    if share > 1:
        # Channels go at a fixed rate; at a budget this large that alone would be too much.
        share = budget
        for one in channels:
            one.key_channel_compression_ratio = 0.0
    tokens[0].compression_ratio = 1 - share
    return press


@dataclass
class Filled:
    """A cache after its prefill."""

    cache: DynamicCache
    position: int
    logits: torch.Tensor
    seconds: float
    bytes: dict[str, int]


@dataclass
class Peer:
    """A model and how its compressed caches are read."""

    model: Any
    masking: str
    seed: int
    used: set[str] = field(default_factory=set)
    zeroing: bool = False

    @property
    def attentions(self) -> list[Any]:
        return [layer.self_attn for layer in self.model.model.layers]

    def prefill(self, press: Any, ids: list[int], question: int) -> Filled:
        """Read `ids`, of which the last `question` ask something, under the press."""
        presses = [] if press is None else list(parts(press))
        eager = any(isinstance(one, kvpress.ObservedAttentionPress) for one in presses)
        self.model.set_attn_implementation("eager" if eager else "sdpa")
        for attention in self.attentions:
            # kvpress clears the marks of the prompt before only in attention functions that it has wrapped.
            attention.masked_key_indices = None
        length = len(ids)
        if isinstance(press, kvpress.FinchPress):
            # A token that the text does not contain separates the window; FINCH's hook takes its embedding out again.
            press.delimiter_token_id = min(set(range(self.model.config.vocab_size)) - set(ids))
            window = question or FINCH_WINDOW
            ids = [*ids[: length - window], press.delimiter_token_id, *ids[length - window :]]
        cache = DynamicCache()
        torch.manual_seed(self.seed)
        started = time.perf_counter()
        with press(self.model) if press is not None else nullcontext():
            hidden = self.model.model(input_ids=torch.tensor([ids]), past_key_values=cache).last_hidden_state
        seconds = time.perf_counter() - started
        rerotated = isinstance(press, kvpress.KeyRerotationPress) or (
            isinstance(press, kvpress.FinchPress) and press.rerotate_keys
        )
        position = cache.get_seq_length() if rerotated else length
        self.zeroing = any(isinstance(one, kvpress.ThinKPress) for one in presses)
        return Filled(cache, position, self.model.lm_head(hidden[:, -1:])[0], seconds, self.held(cache, length))

    def held(self, cache: DynamicCache, length: int) -> dict[str, int]:
        """Bytes of a cache that `length` tokens were read into."""
        real = nominal = full = 0
        for attention, layer in zip(self.attentions, cache.layers, strict=True):
            keys, values = layer.keys, layer.values
            entry = (keys.shape[-1] + values.shape[-1]) * keys.element_size()
            real += keys.nbytes + values.nbytes
            marked = 0 if attention.masked_key_indices is None else attention.masked_key_indices[0].numel()
            # Channels that a press has zeroed; a model may have some that are always zero, which nobody frees.
            zeroed = int((keys == 0).all(dim=2).sum()) * keys.shape[2] * keys.element_size() if self.zeroing else 0
            nominal += keys.nbytes + values.nbytes - marked * entry - zeroed
            full += keys.shape[0] * keys.shape[1] * length * entry
        return {"cache_bytes": real, "nominal_bytes": nominal, "full_bytes": full}

    @contextmanager
    def reading(self, exact: bool) -> Iterator[None]:
        """While the context lasts, every layer is masked by the length of its own cache.

        transformers makes one mask out of the length of the first layer, which fails where a press leaves layers of
        different lengths. With `exact`, entries marked as evicted are in the mask too.
        """
        marks = [attention.masked_key_indices for attention in self.attentions]

        def mask(module: Any, _: Any, kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
            hidden = kwargs["hidden_states"]
            past, new = kwargs["past_key_values"].get_seq_length(module.layer_idx), hidden.shape[1]
            lowest = torch.finfo(hidden.dtype).min
            values = hidden.new_zeros(1, 1, new, past + new)
            values[..., past:] = torch.full((new, new), lowest, dtype=hidden.dtype).triu(1)
            if exact and marks[module.layer_idx] is not None:
                _, heads, entries = marks[module.layer_idx]
                gone = torch.zeros(module.config.num_key_value_heads, past + new, dtype=torch.bool)
                gone[heads, entries] = True
                gone = gone.repeat_interleave(module.num_key_value_groups, dim=0)[None, :, None]
                values = values.masked_fill(gone, lowest)
            return (), {**kwargs, "attention_mask": values}

        hooks = [one.register_forward_pre_hook(mask, with_kwargs=True) for one in self.attentions]
        try:
            if exact:
                for attention in self.attentions:
                    attention.masked_key_indices = None
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for attention, before in zip(self.attentions, marks, strict=True):
                attention.masked_key_indices = before

    def read(self, cache: DynamicCache, ids: list[int], position: int, keep: int = 0) -> torch.Tensor:
        """Logits `[keep or all, vocabulary]` of more tokens after a compressed cache, which grows by them."""
        positions = torch.arange(position, position + len(ids))[None]
        marked = any(one.masked_key_indices is not None for one in self.attentions)
        before = [(layer.keys, layer.values) for layer in cache.layers]
        for masking in ["fake keys", "exact"] if self.masking == "fake keys" and marked else ["exact"]:
            try:
                with self.reading(masking == "exact"):
                    out = self.model(
                        input_ids=torch.tensor([ids]),
                        past_key_values=cache,
                        position_ids=positions,
                        logits_to_keep=keep,
                    )
            except ValueError as error:
                if masking == "exact" or NO_FAKE_KEYS not in str(error):
                    raise
                for layer, (keys, values) in zip(cache.layers, before, strict=True):
                    layer.keys, layer.values = keys, values
                continue
            if marked:
                self.used.add(masking)
            return out.logits[0]
        raise AssertionError("the exact mask either works or raises")

    def answers(self, filled: Filled, question: list[int], answer: list[int]) -> bool:
        """Whether greedy decoding after the question gives the answer; what follows a wrong token cannot matter."""
        cache, position, logits = copy.deepcopy(filled.cache), filled.position, filled.logits
        if question:
            logits = self.read(cache, question, position, keep=1)
            position += len(question)
        for index, wanted in enumerate(answer):
            if int(logits[-1].argmax()) != wanted:
                return False
            if index + 1 < len(answer):
                logits = self.read(cache, [wanted], position, keep=1)
                position += 1
        return True

    def retrieve(
        self, wanted: dict[str, Any], budget: float | None, item: dict[str, Any], query_aware: bool
    ) -> dict[str, Any]:
        """The questions of an item."""
        questions = item["questions"]
        correct, fills, context = 0, [], item["context"]
        for number, question in enumerate(questions):
            if query_aware:
                fills.append(self.prefill(press_of(wanted, budget), context + question["ids"], len(question["ids"])))
            elif number == 0:
                fills.append(self.prefill(press_of(wanted, budget), context, 0))
            correct += self.answers(fills[-1], [] if query_aware else question["ids"], question["answer"])
        return {"correct": correct, "asked": len(questions), **averages(fills)}

    def follow(self, wanted: dict[str, Any], budget: float | None, text: dict[str, Any]) -> dict[str, Any]:
        """The mean negative log-likelihood of the rest of a text."""
        ids, prompt = text["ids"], text["prompt"]
        filled = self.prefill(press_of(wanted, budget), ids[:prompt], 0)
        logits = self.read(filled.cache, ids[prompt:-1], filled.position)
        nll = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[prompt + 1 :]))
        return {"nll": float(nll), "tokens": len(ids) - prompt - 1, **averages([filled])}

    def decode(self, wanted: dict[str, Any], budget: float, text: dict[str, Any]) -> dict[str, Any]:
        """The mean negative log-likelihood of the rest of a text, token by token, compressed while decoding."""
        ids, prompt = text["ids"], text["prompt"]
        press = None
        if wanted["press"] is not None:
            press = kvpress.DecodingPress(
                base_press=build(wanted), compression_interval=INTERVAL, target_size=round(budget * len(ids))
            )
        self.model.set_attn_implementation("sdpa")
        for attention in self.attentions:
            attention.masked_key_indices = None
        cache, nll, started = DynamicCache(), 0.0, time.perf_counter()
        with press(self.model) if press is not None else nullcontext():
            logits = self.model(input_ids=torch.tensor([ids[:prompt]]), past_key_values=cache).logits[0, -1]
            for place, token in enumerate(ids[prompt:], prompt):
                nll -= float(logits.float().log_softmax(-1)[token])
                logits = self.model(
                    input_ids=torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[place]])
                ).logits[0, -1]
        seconds, held = time.perf_counter() - started, self.held(cache, len(ids))
        rest = len(ids) - prompt
        return {"nll": nll / rest, "tokens": rest, **held, "prefill_seconds": round(seconds, 4)}

    def row(
        self, wanted: dict[str, Any], budget: float | None, task: str, case: dict[str, Any], query_aware: bool
    ) -> dict[str, Any]:
        """One method at one budget on one item or text; what it raises is its result."""
        row: dict[str, Any] = {"method": wanted["name"], "budget": budget, "task": task, "id": case["id"]}
        for name in (
            "correct",
            "asked",
            "nll",
            "tokens",
            "cache_bytes",
            "nominal_bytes",
            "full_bytes",
            "prefill_seconds",
        ):
            row[name] = None
        self.used.clear()
        started, error = time.perf_counter(), None
        try:
            with torch.no_grad():
                if task == "steps":
                    row.update(self.decode(wanted, budget, case))
                elif task == "retrieval":
                    row.update(self.retrieve(wanted, budget, case, query_aware))
                else:
                    row.update(self.follow(wanted, budget, case))
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"[:500]
        seconds = time.perf_counter() - started
        return {**row, "masking": sorted(self.used), "seconds": round(seconds, 4), "error": error}


def averages(fills: list[Filled]) -> dict[str, Any]:
    """Bytes of the caches of an item, which differ where the question is part of what was prefilled."""
    names = fills[0].bytes if fills else {}
    sizes = {name: statistics.fmean(one.bytes[name] for one in fills) for name in names}
    return {**sizes, "prefill_seconds": round(sum(one.seconds for one in fills), 4)}


def progress(rows: list[dict[str, Any]]) -> str:
    """A line about the rows of one method and budget."""
    done = [row for row in rows if row["error"] is None]
    line = f"{rows[0]['method']:36} {rows[0]['budget'] or 1.0:7.4f}"
    if done:
        held = sum(row["nominal_bytes"] for row in done) / sum(row["full_bytes"] for row in done)
        line += f"  held {held:.4f}"
    if asked := sum(row["asked"] or 0 for row in done):
        line += f"  right {sum(row['correct'] or 0 for row in done)}/{asked}"
    if texts := [row["nll"] for row in done if row["nll"] is not None]:
        line += f"  nll {statistics.fmean(texts):.4f}"
    errors = {row["error"] for row in rows if row["error"]}
    return line + f"  {sum(row['seconds'] for row in rows):.1f} s" + "".join(f"\n    {error}" for error in errors)


def main() -> None:
    """Command line."""
    if len(sys.argv) != 3:
        raise SystemExit("kv_press.py JOB.json OUT.json")
    job, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    # Presses warn about what a benchmark has read in their documentation.
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(job.get("threads", 2))
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job.get("dtype", "float32"))).eval()
    masking = job.get("masking", "exact")
    if masking not in ("exact", "fake keys"):
        raise SystemExit(f"masking is {masking!r}: 'exact' or 'fake keys'")
    peer = Peer(model, masking, job.get("seed", 0))
    cases = [("retrieval", one) for one in job.get("items", [])] + [("text", one) for one in job.get("texts", [])]
    cases += [("steps", one) for one in job.get("steps", [])]
    gates = job.get("gates")
    if gates:
        give_gates(gates)
    usual = [*DEFAULT_METHODS, *(DUO_METHODS if gates else [])]
    methods = job.get("methods") or (DECODING_METHODS if job.get("steps") else usual)
    query_aware = job.get("query_aware", False)
    head = {
        **{name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")},
        "job": {**{name: job[name] for name in job if name not in ("items", "texts", "steps")}, "masking": masking},
    }
    head["job"]["methods"] = methods
    rows: list[dict[str, Any]] = []
    for wanted, budgets in [(FULL, [1.0]), *((one, [None] if one.get("fixed") else job["budgets"]) for one in methods)]:
        for budget in budgets:
            new = [peer.row(wanted, budget, task, case, query_aware) for task, case in cases]
            if new:
                rows += new
                print(progress(new), file=sys.stderr, flush=True)
        # Written as it grows: a long job that is cut off keeps what it has.
        target.write_text(json.dumps({**head, "rows": rows}))


if __name__ == "__main__":
    main()
