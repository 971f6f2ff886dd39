"""Speed of a model: load time, prefill, decode, memory; each model runs in a process of its own, whose memory is its own.

`run_isolated` starts `python -m compress.evaluate.speed`, which measures one model and writes the result to a file.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.errors import CompressError, RequestError
from runtime.system.memory import peak_bytes
from runtime.system.processes import how_it_ended


@dataclass(frozen=True)
class SpeedRequest:
    """What is measured.

    Attributes:
        model: path of an artifact or checkpoint.
        engine: `runtime` is ours; `transformers` is `AutoModelForCausalLM.from_pretrained(dtype=bfloat16)`, to compare with.
        prompt_tokens, new_tokens, batch_size: shape of a round; the prompts are random token ids.
        repeat: measured rounds after one warm-up; medians are reported.
        options: keywords of `runtime.load`.
    """

    model: str
    engine: str = "runtime"
    prompt_tokens: int = 128
    new_tokens: int = 64
    batch_size: int = 1
    repeat: int = 3
    options: dict[str, Any] = field(default_factory=dict)


def run_isolated(request: SpeedRequest) -> dict[str, Any]:
    """`measure` in a process of its own.

    Raises:
        RequestError, CompressError: what `measure` raised there, or that the process died.
    """
    with tempfile.TemporaryDirectory(prefix="compress-bench-") as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", "compress.evaluate.speed", json.dumps(asdict(request)), str(result)]
        # What libraries print there goes to stderr (2) here: stdout belongs to the caller.
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
        if not result.is_file():
            raise CompressError(f"the process that measures {request.model} {how_it_ended(code)}; there is no result")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    if "error" in found:
        raise (RequestError if found["exit_code"] == 2 else CompressError)(found["error"])
    return found


def measure(request: SpeedRequest) -> dict[str, Any]:
    """Load one model and time it in this process.

    Returns:
        `load_seconds`, `prefill_tokens_per_second`, `decode_tokens_per_second` (over the whole batch), `first_token_seconds`,
        `weight_bytes`, `resident_bytes` (growth of the process by loading), `peak_bytes` (largest size of the process), on a
        GPU `device_peak_bytes`, `kernels` ({what computes a layer, for each shape class where they differ: number of layers}),
        `decoder` (what runs them); of our runtime `cache_bytes` (at their largest), `kv_cache` (the policy in words; None: plain) and
        `kv_cache_read_share` (of the tokens held, those that steps read; None: the policy has no selection).

    Raises:
        RequestError: the prompt and the new tokens do not fit the model's context, or the model cannot be loaded.
    """
    import psutil

    # What every model needs is imported before the clock starts.
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    from runtime import load  # noqa: F401

    process = psutil.Process()
    base = process.memory_info().rss
    start = time.perf_counter()
    loaded = _ENGINES[request.engine](request)
    load_seconds = time.perf_counter() - start
    resident = process.memory_info().rss - base
    generator = torch.Generator().manual_seed(0)
    shape = (request.batch_size, request.prompt_tokens)
    prompts = torch.randint(0, loaded.vocab_size, shape, generator=generator).tolist()
    total = request.prompt_tokens + request.new_tokens
    if loaded.context_length is not None and total > loaded.context_length:
        raise RequestError(
            f"{request.prompt_tokens} prompt tokens and {request.new_tokens} new ones exceed the context of {loaded.context_length}"
        )
    loaded.time(prompts, min(4, request.new_tokens))
    rounds = [loaded.time(prompts, request.new_tokens) for _ in range(request.repeat)]
    prefill, decode = (statistics.median(values) for values in zip(*rounds, strict=True))
    result = {
        "model": request.model,
        "engine": request.engine,
        "load_seconds": load_seconds,
        "first_token_seconds": prefill,
        "prefill_tokens_per_second": request.batch_size * request.prompt_tokens / prefill,
        "decode_tokens_per_second": request.batch_size * (request.new_tokens - 1) / decode,
        "resident_bytes": resident,
        "peak_bytes": peak_bytes(),
        "threads": torch.get_num_threads(),
        **loaded.facts,
        **loaded.cache(),
    }
    if result["device"].startswith("cuda"):
        result["device_peak_bytes"] = torch.cuda.max_memory_allocated()
    return result


@dataclass
class _Loaded:
    """A model of either engine, as `measure` uses it.

    Attributes:
        time: (prompts, new tokens) to seconds of (prefill, decode).
        facts: `weight_bytes`, `kernels`, `device` and `decoder` of `measure`.
        cache: what `measure` says of the cache after a round.
    """

    time: Callable[[list[list[int]], int], tuple[float, float]]
    vocab_size: int
    context_length: int | None
    facts: dict[str, Any]
    cache: Callable[[], dict[str, Any]] = dict


def _load_runtime(request: SpeedRequest) -> _Loaded:
    import runtime

    # The same prompts are read again and again: none may be found in the cache.
    model = runtime.load(request.model, **{"prefix_cache": 0, **request.options})
    if not isinstance(model, runtime.Model):
        raise RequestError(f"{request.model} is a {type(model).__name__}; speed is measured of causal language models")

    def time_one(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        model.generate(prompts, max_new_tokens=new_tokens, ignore_eos=True)
        return model.stats["prefill_seconds"], model.stats["decode_seconds"]

    def cache() -> dict[str, Any]:
        return {key: model.stats[key] for key in ("cache_bytes", "kv_cache", "kv_cache_read_share")}

    engine = model.engine
    kernels = [kernel for layer, kernel in model.explain().items() if layer != "model"]
    facts = {
        "weight_bytes": engine.weight_bytes, "kernels": dict(Counter(kernels).most_common()),
        "device": str(engine.device), "decoder": engine.description,
    }  # fmt: skip
    return _Loaded(time_one, engine.vocab_size, engine.context_length, facts, cache)


def _load_transformers(request: SpeedRequest) -> _Loaded:
    from transformers import AutoModelForCausalLM

    from runtime.api.load import read_device
    from runtime.checkpoint.locate import resolve
    from runtime.engines.torch.engine import weight_bytes

    options = request.options
    if options.get("threads"):
        torch.set_num_threads(options["threads"])
    device = read_device(options.get("device", "auto"))
    trust = bool(options.get("trust_remote_code", False))
    try:
        path = str(resolve(request.model, trust))
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, trust_remote_code=trust)
        model = model.to(device)
    except (OSError, ValueError, RuntimeError) as error:
        raise RequestError(f"transformers cannot load {request.model}: {str(error).strip().splitlines()[0]}") from error
    model.eval()

    def generate(ids: Any, new_tokens: int) -> float:
        start = time.perf_counter()
        # pad_token_id only silences a warning: nothing is padded here.
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens,
            pad_token_id=0,
        )  # fmt: skip
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def time_one(prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
        ids = torch.tensor(prompts, device=device)
        prefill = generate(ids, 1)
        return prefill, max(generate(ids, new_tokens) - prefill, 1e-9)

    config = model.config.get_text_config()
    layers = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    facts = {
        "weight_bytes": weight_bytes(model), "kernels": {"torch bfloat16": layers}, "device": str(device),
        "decoder": f"transformers' {type(model).__name__}",
    }  # fmt: skip
    return _Loaded(time_one, config.vocab_size, getattr(config, "max_position_embeddings", None), facts)


_ENGINES: dict[str, Callable[[SpeedRequest], _Loaded]] = {"runtime": _load_runtime, "transformers": _load_transformers}


def _main(arguments: list[str]) -> int:
    request, output = SpeedRequest(**json.loads(arguments[0])), Path(arguments[1])
    try:
        found = measure(request)
    except CompressError as error:
        found = {"error": str(error), "exit_code": error.exit_code}
    output.write_text(json.dumps(found), encoding="utf-8")
    return int(found.get("exit_code", 0))


# Seconds that one token takes, of a model as `runtime.load` runs it: at batch 1, the least of a few rounds.

PROMPT_TOKENS = 16
NEW_TOKENS = 9
TEXT_TOKENS = 128  # of an encoder, which takes a text at a time
# Rounds go on until there are so many and they took so long; tiny models need many to find a quiet moment.
ROUNDS = 5
SECONDS = 0.4
MOST_ROUNDS = 100


def token_time(path: Path, device: torch.device) -> float:
    """Seconds: of a causal language model a decoding step, of an encoder-decoder a step of its decoder, of an encoder the forward of a
    text of 128 tokens. Loading, prefill and the first round are not counted.

    Args:
        path: a plain checkpoint; its tokenizer is not used.
    """
    import runtime
    from runtime.api.encoder import EncoderModel

    model: Any = runtime.load(path, device=device, kv_cache=False, drafter=False, verify=False)
    limit = model.engine.context_length
    if isinstance(model, EncoderModel):
        text = torch.zeros(1, min(TEXT_TOKENS, limit or TEXT_TOKENS), dtype=torch.int64)
        return _least(lambda: _forward(model, text))
    limits = [n for n in (limit, getattr(model.engine, "decoder_context_length", None)) if n is not None]
    prompt = [0] * min([PROMPT_TOKENS, *(n // 2 for n in limits)])
    new = min([NEW_TOKENS, *(n - len(prompt) - 1 for n in limits)])
    if new < 2:
        raise RequestError(f"a context of {min(limits)} tokens is too short")
    return _least(lambda: _decode(model, prompt, new))


def _forward(model: Any, text: torch.Tensor) -> float:
    start = time.perf_counter()
    model.hidden_states(text).cpu()  # a GPU is done when its numbers are here
    return time.perf_counter() - start


def _decode(model: Any, prompt: list[int], new: int) -> float:
    model.generate(prompt, max_new_tokens=new, ignore_eos=True)
    return float(model.stats["decode_seconds"]) / (new - 1)


def _least(measure: Callable[[], float]) -> float:
    """The least of a few rounds after one that warms up: what disturbs only ever adds."""
    measure()
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < ROUNDS or (len(found) < MOST_ROUNDS and time.perf_counter() - start < SECONDS):
        found.append(measure())
    return min(found)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
