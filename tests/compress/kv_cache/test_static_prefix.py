"""Static activations behind prefix tokens: from the recipe to the tokens of both engines."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import SMALL, VOCABULARY, byte_tokenizer
from random_models import UNLIMITED
from transformers import AutoConfig, AutoModelForCausalLM

import compress
import runtime
from compress.cli import main
from compress.core.files import write_sealed
from compress.core.progress import Reporter
from compress.evaluate.evaluate import evaluate
from compress.kv_cache import outlier_tokens
from compress.kv_cache.calibrate import calibrate
from compress.kv_cache.outlier_tokens import OutlierTokens, find_before_compression
from compress.model.streamed import StreamedModel
from compress.weights import block_pass
from export import fitting
from runtime.checkpoint.artifact import Artifact
from runtime.checkpoint.checkpoint import Checkpoint
from runtime.errors import RequestError
from runtime.kv_cache.policy.calibrated import fingerprint
from runtime.layers.unrounded import input_prefix, unrounded
from runtime.modeling.skeleton import read_config

STATIC = {"method": "rtn", "bits": 8, "group_size": "channel", "activations": "int8", "activation_mode": "static"}
PLAIN = {"method": "prefixquant", "keys": None, "values": None, "recent": 16}
PREFIX = [7, 200, 9]
LONG = [5 + i % 90 for i in range(70)]  # crosses a page
PROMPTS = [[*range(10, 40)], [60, 61, 62], [5], [*range(20, 110)]]


def _random(directory: Path, family: str, **changes: Any) -> Path:
    torch.manual_seed(len(family))
    settings = {**SMALL[family], "vocab_size": VOCABULARY, "max_position_embeddings": 128, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.5 / parameter.shape[1] ** 0.5)
        if family == "gpt2":
            _plant(model)
    model.save_pretrained(directory / family)
    byte_tokenizer().save_pretrained(directory / family)
    return directory / family


def _plant(model: Any) -> None:
    """The first token of a text, whichever it is, drives one channel of each MLP to hundreds of times what other tokens reach."""
    model.lm_head.weight.normal_(0, 0.2)
    inner = model.transformer
    inner.wte.weight.normal_()
    inner.wte.weight[:, 0] = 0
    inner.wpe.weight.zero_()
    inner.wpe.weight[0, 0] = 40
    for block in inner.h:
        block.mlp.c_fc.weight[0] = 0
        block.mlp.c_fc.weight[:, 0] = 0
        block.mlp.c_fc.weight[0, 0] = 300
        block.mlp.c_fc.bias[0] = -900
        block.mlp.c_proj.weight[0] *= 0.004


def _request(model: Path, *stages: dict[str, Any], **sections: Any) -> dict[str, Any]:
    text = model.parent / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(300)), encoding="utf-8")
    given = {"data": str(text), "samples": 8, "sequence_length": 32, "batch_size": 4}
    return {"name": "test", "model": str(model), "calibration": given, "stages": list(stages), **sections}


@pytest.fixture(scope="module")
def sinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first tokens are outliers."""
    return _random(tmp_path_factory.mktemp("sinking"), "gpt2", tie_word_embeddings=False, bos_token_id=None)


@pytest.fixture(scope="module")
def behind(sinking: Path) -> Any:
    """It, with static grids behind the prefix that was found."""
    text = str(sinking.parent / "text.txt")
    windows = {**UNLIMITED, "data": text, "sequence_length": 32, "samples": 2}
    request = _request(sinking, {"quantize": STATIC}, {"kv_cache": PLAIN}, evaluate=windows)
    return compress.apply(request, output=sinking.parent / "behind", quiet=True, device="cpu")


@pytest.fixture(scope="module")
def pinned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose static grids were calibrated behind given tokens."""
    model = _random(tmp_path_factory.mktemp("pinned"), "llama")
    known = {"fingerprint": fingerprint(read_config(model)), "prefix_tokens": PREFIX}
    request = _request(model, {"kv_cache": {**PLAIN, "calibrated": known}}, {"quantize": STATIC})
    return compress.apply(request, output=model.parent / "out", quiet=True, device="cpu").path


def _scales(path: Path) -> dict[str, float]:
    stored = Checkpoint(path)
    return {name: float(stored.get(name)) for name in stored.names() if name.endswith("input_scale")}


def test_an_outlier_at_the_beginning_ruins_no_grid_behind_the_prefix(sinking, behind, tmp_path, caplog):
    without = compress.apply(_request(sinking, {"quantize": STATIC}), output=tmp_path / "without", quiet=True)
    policy = behind.manifest["kv_cache"]
    assert policy["calibrated"]["prefix_tokens"] == [256], "the token that texts begin with"
    assert policy["calibrated"]["facts"]["prefix_tokens"]["initial"] == 1
    own, others = _scales(behind.path), _scales(without.path)
    assert max(others[name] / own[name] for name in own) > 20
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    exact = runtime.load(sinking, device="cpu").logits(ids).log_softmax(-1)
    kl = {}
    for written in (without, behind):
        ours = runtime.load(written.path, device="cpu").logits(ids).log_softmax(-1)
        kl[written.path.name] = float((exact.exp() * (exact - ours)).sum(-1).mean())
    assert kl["behind"] < 0.25 * kl["without"]
    assert behind.metrics["kl"] < 0.25 * kl["without"], "what the pipeline measures is behind the prefix, too"
    with pytest.raises(
        RequestError,
        match=r"kv_cache\.prefix: .* calibrated without a prefix, and prompts would follow \[256\]; give prefix: 0",
    ):
        runtime.load(without.path, device="cpu", kv_cache=policy)
    write_sealed(without.path / "compress.json", {**without.manifest, "kv_cache": policy})
    runtime.load(without.path, device="cpu", verify=False)  # as earlier versions have written it
    assert "prompts would follow [256]; compress it again" in caplog.text


def test_a_block_at_a_time_finds_the_tokens_that_the_whole_model_does(sinking, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(sinking)
    with torch.no_grad():
        model.transformer.wte.weight[7, 0] = 40  # an outlier wherever it is
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    rows = torch.randint(10, 256, (7, 32), generator=torch.Generator().manual_seed(0))
    rows[:5, 9] = rows[2:, 20] = 7
    streamed = StreamedModel(Checkpoint(tmp_path), torch.device("cpu"))
    context: Any = SimpleNamespace(
        streamed=streamed, batches=[(ids, None) for ids in rows.split(4)], tokenizer=byte_tokenizer()
    )
    before, after = (
        find_before_compression(context, None, Reporter(None, True)),
        calibrate(tmp_path, {"prefix_tokens"}, rows),
    )
    assert before["fingerprint"] == after["fingerprint"]
    assert before["prefix_tokens"] == after["prefix_tokens"] == [256, 7]
    facts, expected = before["facts"]["prefix_tokens"], after["facts"]["prefix_tokens"]
    assert facts == {**expected, "largest": pytest.approx(expected["largest"], rel=1e-4)}
    assert (facts["outliers"], facts["initial"], facts["frequent"]) == (pytest.approx(17 / 7, abs=1e-3), 1, [[7, 10]])


def test_a_finished_artifact_is_calibrated_behind_its_prefix(behind):
    rows = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0))
    found = calibrate(behind.path, {"channels", "prefix_tokens"}, rows)
    assert found["channels"]
    assert found["facts"]["prefix_tokens"]["initial"] == 1, "the prefix itself, not clipped"


def test_a_resumed_run_goes_on_behind_the_same_prefix(sinking, behind, tmp_path, monkeypatch):
    own, request = block_pass.run_block, _request(sinking, {"quantize": STATIC}, {"kv_cache": PLAIN})

    def interrupted(job: Any, index: int, states: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        return own(job, index, states)

    def found_again(*_: Any) -> None:
        raise AssertionError("prefix tokens are found once")

    monkeypatch.setattr(block_pass, "run_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress.apply(request, output=tmp_path / "out", quiet=True, device="cpu")
    monkeypatch.undo()
    monkeypatch.setattr(outlier_tokens, "find_before_compression", found_again)
    resumed = compress.apply(request, output=tmp_path / "out", quiet=True, device="cpu", resume=True)
    hashes = [
        {n: f["sha256"] for n, f in w.manifest["files"].items() if n.startswith("model-")} for w in (resumed, behind)
    ]
    assert hashes[0] == hashes[1]
    assert resumed.manifest["kv_cache"]["calibrated"]["prefix_tokens"] == [256]


def _greedy(module: Any, prompt: list[int], count: int) -> list[int]:
    """Token by token without a cache, the prefix's own inputs unrounded."""
    ids = [*PREFIX, *prompt]
    for _ in range(count):
        with torch.inference_mode(), unrounded(module, len(PREFIX)):
            ids.append(int(module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


def test_both_engines_compute_the_prefix_with_inputs_as_they_are(pinned):
    modules = runtime.load(pinned, device="cpu", kernels="reference")
    native = runtime.load(pinned, device="cpu")
    assert "decoder in C" in native.stats["engine"]
    module = modules.engine.module
    assert list(input_prefix(module)) == PREFIX
    expected = [_greedy(module, prompt, 6) for prompt in PROMPTS]
    for model in (modules, native):
        assert model.generate(PROMPTS, max_new_tokens=6, ignore_eos=True) == expected
        assert model.stats["prompt_tokens"] == sum(map(len, PROMPTS))
        assert [model.generate(prompt, max_new_tokens=6, ignore_eos=True) for prompt in PROMPTS] == expected
        assert model.engine.context_length == 125
        with pytest.raises(RequestError, match="context"):
            model.generate([1] * 120, max_new_tokens=6)
    assert native.generate(PROMPTS[0], max_new_tokens=6, ignore_eos=True, prefill_chunk=2) == expected[0]
    drafted = runtime.load(pinned, device="cpu", drafter="lookup")
    assert drafted.generate(PROMPTS, max_new_tokens=6, ignore_eos=True) == expected
    with torch.inference_mode(), unrounded(module, len(PREFIX)):
        logits = module(input_ids=torch.tensor([[*PREFIX, *PROMPTS[0]]]), use_cache=False).logits[:, len(PREFIX) :]
    torch.testing.assert_close(modules.logits([PROMPTS[0]]), logits)
    torch.testing.assert_close(native.logits([PROMPTS[0]]), logits, atol=1e-3, rtol=1e-3)
    assert native.score(PROMPTS[0]).tokens == modules.score(PROMPTS[0]).tokens == len(PROMPTS[0]) - 1
    assert native.score(PROMPTS[0]).log_likelihood == pytest.approx(modules.score(PROMPTS[0]).log_likelihood, rel=1e-4)
    with torch.inference_mode():
        rounded = module(input_ids=torch.tensor([[*PREFIX, *PROMPTS[0]]]), use_cache=False).logits[:, len(PREFIX) :]
    assert not torch.allclose(rounded, logits, atol=1e-3), "the prefix's inputs matter"


def test_penalties_do_not_see_the_prefix(pinned):
    options = {"max_new_tokens": 8, "ignore_eos": True, "repetition_penalty": 3.0}
    modules, native = (runtime.load(pinned, device="cpu", kernels=kernels) for kernels in ("reference", "auto"))
    assert native.generate(PROMPTS, **options) == modules.generate(PROMPTS, **options)


def _within_bounds(path: Path, bound: int) -> Any:
    """The model with little more memory than it needs."""
    try:
        return runtime.load(path, device="cpu", max_memory=bound)
    except RequestError as error:
        least = float(str(error).partition("at least ")[2].partition(" MB")[0])
        return _within_bounds(path, int(least * 1e6) + 10_000)


def test_eviction_and_streamed_blocks_leave_the_prefix_as_it_is(pinned):
    evict = {"score": "streaming", "tokens": 40, "interval": 8}
    policy = {"evict": evict, "prefix": "calibrated", "recent": 16}
    modules, native = (
        runtime.load(pinned, device="cpu", kernels=kernels, kv_cache=policy) for kernels in ("reference", "auto")
    )
    options = {"max_new_tokens": 12, "ignore_eos": True}
    assert native.generate(PROMPTS, **options) == modules.generate(PROMPTS, **options)
    whole = runtime.load(pinned, device="cpu")
    streamed = _within_bounds(pinned, 1_000_000)
    assert "Streamed" in type(streamed.engine).__name__
    assert streamed.generate(PROMPTS, **options) == whole.generate(PROMPTS, **options)


def test_another_prefix_than_that_of_the_grids_is_refused(pinned, capsys):
    for policy in (False, "kivi"):
        with pytest.raises(
            RequestError,
            match=r"kv_cache\.prefix: .* behind prefix tokens \[7, 200, 9\], and prompts would follow none",
        ):
            runtime.load(pinned, device="cpu", kv_cache=policy)
    own = Artifact(pinned).manifest["kv_cache"]
    assert runtime.load(pinned, device="cpu", kv_cache={"keys": "int8", "prefix": "calibrated"}).generate([1, 2])
    other = json.loads(json.dumps(own).replace("200", "201"))
    with pytest.raises(RequestError, match=r"would follow \[7, 201, 9\]; leave kv_cache out"):
        runtime.load(pinned, device="cpu", kv_cache=other)
    assert main(["generate", str(pinned), "a", "--device", "cpu", "--kv-cache", "none"]) == 2
    assert "calibrated behind prefix tokens" in capsys.readouterr().err


def _without_policy(path: Path, copy: Path) -> Path:
    """A copy of an artifact whose manifest has lost its policy."""
    shutil.copytree(path, copy)
    manifest = json.loads((copy / "compress.json").read_text(encoding="utf-8"))
    del manifest["kv_cache"]
    write_sealed(copy / "compress.json", manifest)
    return copy


def test_an_artifact_that_has_lost_its_policy_must_be_compressed_again(pinned, tmp_path):
    copy = _without_policy(pinned, tmp_path / "copy")
    with pytest.raises(RequestError, match=r"prompts would follow none; compress it again"):
        runtime.load(copy, device="cpu", verify=False)


def test_drafts_and_ranks_refuse_the_artifact(pinned, recipe):
    stage = {"draft": {"method": "distillspec", "layers": 1, "sequence_length": 32, "samples": 8}}
    with pytest.raises(
        RequestError, match=r"stages\.0\.draft: no draft can be trained for .*its static activations need its prefix"
    ):
        compress.draft(pinned, recipe(pinned, stage), device="cpu", quiet=True)
    source = pinned.parent / "llama"
    with pytest.raises(
        RequestError, match=r"drafter: .*out cannot draft: its static activations need its prefix tokens"
    ):
        runtime.load(source, device="cpu", drafter=str(pinned))
    for policy in (None, False):
        with pytest.raises(RequestError, match=r"tensor_parallel=2: .* cannot be divided among ranks: its static"):
            runtime.load(pinned, device="cpu", tensor_parallel=2, kv_cache=policy)


def test_a_reference_is_read_behind_its_prefix(pinned):
    windows = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    options = {"device": "cpu"}
    alone = evaluate(pinned, windows=windows, load_options=options)
    found = evaluate(pinned.parent / "llama", windows=windows, reference=pinned, load_options=options)
    assert found["reference"]["perplexity"] == pytest.approx(alone["perplexity"], rel=1e-6)


def test_a_prefix_as_long_as_a_row_is_refused(sinking, tmp_path, recipe, monkeypatch):
    known = {"fingerprint": fingerprint(read_config(sinking)), "prefix_tokens": [7] * 31}
    request = _request(sinking, {"quantize": STATIC}, {"kv_cache": {**PLAIN, "calibrated": known}})
    text = r"kv_cache\.calibrated\.prefix_tokens: 31 tokens leave no text in rows of 32; raise calibration\.sequence_length"
    with pytest.raises(RequestError, match=text):
        compress.apply(request, output=tmp_path / "known", quiet=True, device="cpu")
    assert not (tmp_path / "known").exists()
    monkeypatch.setattr(OutlierTokens, "finish", lambda *_: ([7] * 31, {}))
    request = _request(sinking, {"quantize": STATIC}, {"kv_cache": PLAIN})
    with pytest.raises(RequestError, match=text):
        compress.apply(request, output=tmp_path / "found", quiet=True, device="cpu")


def test_a_prefix_as_long_as_the_context_is_refused(sinking):
    known = {"fingerprint": fingerprint(read_config(sinking)), "prefix_tokens": [7] * 127}
    with pytest.raises(RequestError, match="127 tokens leave no text in the 128 positions"):
        runtime.load(sinking, device="cpu", kv_cache={**PLAIN, "calibrated": known})


def test_gates_are_not_trained_behind_a_prefix(pinned):
    rows = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with pytest.raises(RequestError, match="gates are trained on rows without the prefix"):
        calibrate(pinned, {"gates"}, rows)


def test_who_puts_no_prefix_before_prompts_refuses_the_artifact(pinned):
    with pytest.raises(RequestError, match=r"load it with runtime\.load: its static activations need its prefix"):
        AutoModelForCausalLM.from_pretrained(pinned)
    reasons = fitting(pinned)
    assert all("prefix tokens" in str(reasons[name]) for name in ("huggingface", "onnx", "gguf"))


@pytest.mark.parametrize(
    ("family", "stages", "sections", "reason"),
    [
        ("mixtral", [], {}, "expert"),
        ("lfm2", [], {}, "layers without keys and values"),
        (
            "llama",
            [{"recover": {"method": "finetune", "steps": 1, "samples": 8, "batch_size": 2}}],
            {},
            "a recovery trains",
        ),
        (
            "llama",
            [{"kv_cache": {"method": "duoattention", "prefix": "calibrated"}}],
            {},
            "gates are trained on rows without the prefix",
        ),
        (
            "llama",
            [{"draft": {"method": "distillspec", "layers": 1, "sequence_length": 32, "samples": 8}}],
            {},
            "puts before no text",
        ),
        ("llama", [], {"calibration": {"data": "bundled", "packing": False}}, "packing"),
    ],
)
def test_what_cannot_be_calibrated_behind_a_prefix_is_refused_at_once(
    make_checkpoint, recipe, tmp_path, monkeypatch, family, stages, sections, reason
):
    layers = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    monkeypatch.setitem(SMALL, "lfm2", {**SMALL["llama"], **layers})
    policy = [] if any("kv_cache" in stage for stage in stages) else [{"kv_cache": PLAIN}]
    model = make_checkpoint(family)
    request = recipe(model, {"quantize": STATIC}, *stages, *policy, **sections)
    with pytest.raises(RequestError, match=reason):
        compress.apply(request, output=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama behind a prefix that crosses a page, its older pages in 4 bits."""
    model = _random(tmp_path_factory.mktemp("long"), "llama", max_position_embeddings=512)
    known = {"fingerprint": fingerprint(read_config(model)), "prefix_tokens": LONG}
    calibration = {"calibration": {**_request(model)["calibration"], "sequence_length": 128}}
    stages = [{"kv_cache": {"method": "prefixquant", "recent": 16, "calibrated": known}}, {"quantize": STATIC}]
    request = _request(model, *stages, **calibration)
    return compress.apply(request, output=model.parent / "out", quiet=True, device="cpu").path


def test_pages_in_few_bits_behind_a_long_prefix(long):
    modules, native = (runtime.load(long, device="cpu", kernels=kernels) for kernels in ("reference", "auto"))
    assert "decoder in C" in native.stats["engine"]
    short = [[60, 61, 62], [5], [7, 8]]
    alone = [native.generate(prompt, max_new_tokens=6, ignore_eos=True) for prompt in short]
    assert alone == [modules.generate(prompt, max_new_tokens=6, ignore_eos=True) for prompt in short]
    assert native.generate(short, max_new_tokens=6, ignore_eos=True) == alone
    with ThreadPoolExecutor(3) as pool:
        together = pool.map(lambda prompt: native.generate(prompt, max_new_tokens=6, ignore_eos=True), short * 3)
    assert list(together) == alone * 3
    stream = native.stream(short[0], max_new_tokens=6, ignore_eos=True)
    next(stream)
    stream.close()
    assert native.generate(short[0], max_new_tokens=6, ignore_eos=True) == alone[0], "after one that was left"
