"""What a plan says of recipes whose stages make other models first: memory, disk, time, and what would help where there is too little."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import VOCABULARY, byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import compress
from compress.distill.recover.job import RecoverJob
from compress.distill.recover.teachers import cached_bytes
from compress.distill.train import checkpoint
from compress.model import context, hidden_states
from compress.model.checkpoint_writer import PlainWriter
from compress.model.footprint import Speed
from compress.prune.structure.job import StructureJob
from compress.recipe import load
from compress.run import plan as footprint
from compress.run.plan import Plan, make_plan
from runtime.errors import RequestError
from runtime.formats.row_codebook import RowCodebook

GB = 10**9
MODEL = 64, 96, 3  # hidden size, channels and blocks of the small model


def structure(method: str = "obs", remove: str = "ffn", **fields: Any) -> dict[str, Any]:
    amount = {} if {"ratio", "budget"} & fields.keys() else {"keep": 2 if remove == "layers" else 64}
    return {"structure": {"method": method, "remove": remove, **amount, **fields}}


def recover(method: str = "finetune", **fields: Any) -> dict[str, Any]:
    small = {
        "samples": 24,
        "sequence_length": 32,
        "steps": 6,
        "batch_size": 4,
        "evaluate_every": 3,
        "cross_entropy": 0.1,
    }
    return {"recover": {"method": method, **small, **fields}}


@pytest.fixture
def planned(make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """`planned(*stages, available=, **config)`: a plan without what changes from call to call."""
    source: dict[str, Path] = {}

    def plan(
        *stages: dict[str, Any], available: int = 64 * GB, calibration: dict[str, Any] | None = None, **config: Any
    ) -> Plan:
        key = json.dumps(config)
        if key not in source:
            source[key] = make_checkpoint(name=f"model{len(source)}", dtype=torch.float32, **config)
        monkeypatch.setattr(footprint, "memory_bytes", lambda: 0)
        monkeypatch.setattr("compress.evaluate.texts.doubt", lambda _: [])
        monkeypatch.setattr(
            "compress.weights.footprint.WHOLE_BYTES", 0
        )  # of models so small, loading them whole takes most
        monkeypatch.setattr(Speed, "measured", lambda _: Speed(1e9, 1e9, 1e9))
        monkeypatch.setattr(footprint, "free_bytes", lambda: available)
        request = recipe(source[key], *stages)
        request["calibration"] |= calibration or {}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(request))
        return make_plan(load(tmp_path / "recipe.yaml"), tmp_path / "out")

    return plan


# ---------------------------------------------------------------- hidden states and second moments
@pytest.mark.parametrize(
    ("stage", "models"),
    [
        (structure("obs"), 1),
        (structure("wanda", reconstruct=False), 1),
        (structure("magnitude"), 1),  # the refit reads the text
        (structure("block_influence", "layers"), 1),
        (structure("activation", "hidden", keep=32), 2),
        (structure("magnitude", reconstruct=False), 0),
        (structure("magnitude", "layers"), 0),
    ],
)
def test_passes_hold_the_hidden_states_of_all_rows(planned: Callable[..., Plan], stage: Any, models: int) -> None:
    few, many = (planned(stage, calibration={"samples": count, "batch_size": 4}) for count in (50, 100))
    states = models * 50 * 32 * MODEL[0] * 4  # of the rows that there are more of
    assert many.peak_memory - few.peak_memory == states
    assert many.disk_needed - few.disk_needed == 3 * states
    # Where they spill, they are no more in memory than those of a pass that compresses layers are.
    least = planned(stage, calibration={"samples": 100, "batch_size": 4}, available=1)
    assert least.spill == bool(models)
    assert many.peak_memory - least.peak_memory == 2 * states
    assert not many.spill


@pytest.mark.slow
def test_states_of_a_pass_spill(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "SPILL_SHARE", 0.0)
    places = []
    real = hidden_states.HiddenStates.__init__

    def made(self: Any, count: int, spill: Path | None = None, *rest: Any) -> None:
        places.append(spill)
        real(self, count, spill, *rest)

    monkeypatch.setattr(hidden_states.HiddenStates, "__init__", made)
    request = recipe(make_checkpoint(), structure())
    spilled = compress.apply(request, output=tmp_path / "spilled", quiet=True)
    assert any(place is not None and place.name == "hidden-next" and "pass-00000" in str(place) for place in places)
    monkeypatch.setattr(footprint, "SPILL_SHARE", 0.2)
    held = compress.apply(request, output=tmp_path / "held", quiet=True)
    for file in held.path.glob("*.safetensors"):
        assert file.read_bytes() == (spilled.path / file.name).read_bytes()


def test_fitting_takes_the_square_of_the_channels(planned: Callable[..., Plan]) -> None:
    wide = {"intermediate_size": 2048}
    fitted, plain = (planned(structure("wanda", reconstruct=r), **wide).peak_memory for r in (True, False))
    assert 40 * 2048**2 < fitted - plain < 60 * 2048**2
    obs = planned(structure("obs", reconstruct=False), **wide).peak_memory
    assert obs == fitted
    pairs = planned(structure("gradient_free", reconstruct=False), **wide).peak_memory
    assert plain + 20 * 2048**2 < pairs < obs
    heads = planned(structure("obs", "heads", keep=1), **wide).peak_memory
    assert heads - plain < 2048**2, "64 inputs are read where heads go"


def test_few_tokens_for_many_inputs_are_warned_of(planned: Callable[..., Plan]) -> None:
    (found,) = planned(structure(), intermediate_size=512).warnings
    assert "recipe.yaml:" in found
    assert "calibration.samples: 256 tokens" in found
    assert "512 inputs" in found
    assert "stage 0 (structure)" in found
    assert planned(structure("magnitude", reconstruct=False), intermediate_size=512).warnings == []
    assert planned(structure(), calibration={"samples": 16}, intermediate_size=512).warnings == []
    assert (
        "192 inputs"
        in planned(
            structure("activation", "hidden", keep=32), calibration={"samples": 2}, intermediate_size=192
        ).warnings[0]
    )


# ---------------------------------------------------------------- disk
@pytest.mark.slow
def test_the_disk_is_enough_for_the_passes(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there at the moments when there is most is nearly what was planned, and no more."""
    out = tmp_path / "out"
    seen = [0]

    def look() -> None:
        seen[0] = max(seen[0], sum(file.stat().st_size for file in out.rglob("*") if file.is_file()))

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            look()
            found = real(*arguments, **keywords)
            look()
            return found

        monkeypatch.setattr(owner, name, call)

    watched(PlainWriter, "finish")
    watched(checkpoint.shutil, "rmtree")
    source = make_checkpoint(hidden_size=128, intermediate_size=512)
    cached = recover(steps=9, teacher="cached", samples=48, learning_rate=1e-6)
    for stages in (
        [structure("magnitude", "layers", keep=2), structure(keep=480)],
        [structure(keep=480), cached],
        [{"prune": {"method": "wanda", "pattern": "2:4"}}, cached],
        [recover("lora", teacher="cached", samples=48, learning_rate=1e-6)],
    ):
        request = recipe(source, *stages)
        seen[0] = 0
        needed = make_plan(load(request), out).disk_needed - footprint.DISK_MARGIN
        compress.apply(request, output=out, quiet=True, overwrite=True)
        # Companions of checkpoints, facts and the log are not counted.
        assert 0.6 * needed < seen[0] < 1.1 * needed + 2**18, (stages, seen[0], needed)


def test_a_cached_teacher_is_on_the_disk(planned: Callable[..., Plan]) -> None:
    memory, cached = (planned(recover(samples=4000, teacher=teacher)) for teacher in ("memory", "cached"))
    hidden_size, _, blocks = MODEL
    assert cached.disk_needed - memory.disk_needed == cached_bytes(4000 * 32, hidden_size, 4, blocks, 64)
    assert cached.peak_memory < memory.peak_memory


def test_checkpoints_of_passes_count(planned: Callable[..., Plan]) -> None:
    stage = structure("magnitude", reconstruct=False, keep=96 - 1, multiple=1)
    alone = planned({"prune": {"method": "magnitude", "sparsity": 0.5}})
    one, two = planned(stage), planned(stage, structure("magnitude", reconstruct=False, keep=94, multiple=1))
    assert one.disk_needed > 1.9 * one.bytes_after + footprint.DISK_MARGIN
    assert two.disk_needed > 1.9 * two.bytes_after + footprint.DISK_MARGIN
    assert alone.disk_needed < 1.1 * alone.bytes_before + footprint.DISK_MARGIN


# ---------------------------------------------------------------- time
def test_passes_take_time(planned: Callable[..., Plan]) -> None:
    alone = planned({"quantize": {"method": "rtn", "bits": 8, "group_size": 32}}).seconds
    cut, by_gradients = (
        planned(structure(method), calibration={"samples": 64}).seconds for method in ("obs", "taylor")
    )
    assert alone < cut
    assert alone < by_gradients
    few, many = (planned(recover(steps=steps)).seconds for steps in (10, 1000))
    assert 50 < (many - alone) / (few - alone) < 100
    both = planned({"prune": {"method": "sparsegpt", "sparsity": 0.5}}, recover(steps=10)).seconds
    assert both > few
    assert planned(recover(steps=1000, gradient_checkpointing=True)).seconds > many


def test_refits_take_time(planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """After the column loop and after every sweep; rounding to nearest has none."""
    monkeypatch.setattr(Speed, "measured", classmethod(lambda cls, _: cls(1e9, 1e9, 1e9)))
    found: dict[tuple[str, int], list[float]] = {}
    for products in (0, 10**6):
        monkeypatch.setattr(RowCodebook, "refit_products", products)
        for method, sweeps in (("rtn", 0), ("gptq", 0), ("gptq", 2)):
            fields = {"sweeps": sweeps} if method == "gptq" else {}
            stage = {"quantize": {"method": method, "scheme": "W4A16_CODEBOOK", **fields}}
            found.setdefault((method, sweeps), []).append(planned(stage).seconds)
    more = {case: after - before for case, (before, after) in found.items()}
    assert more["rtn", 0] == 0
    assert more["gptq", 0] > 0
    assert more["gptq", 2] == pytest.approx(3 * more["gptq", 0])


@pytest.mark.slow
@pytest.mark.parametrize("layered", [False, True])
def test_the_time_of_a_pass_is_that_of_its_kind(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layered: bool
) -> None:
    from compress.run import record

    now = [0.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])
    for kind, seconds in ((StructureJob, 3.0), (RecoverJob, 10.0)):

        def timed(*arguments: Any, real: Any = kind.run, seconds: float = seconds) -> Any:
            found = real(*arguments)
            now[0] += seconds
            return found

        monkeypatch.setattr(kind, "run", timed)
    prune = [{"prune": {"method": "magnitude", "sparsity": 0.5}}, recover()] if layered else []
    request = recipe(make_checkpoint(), structure(), recover(), *prune)
    made = compress.apply(request, output=tmp_path / "out", quiet=True)
    phases = {name: seconds for name, seconds in made.seconds.items() if name in ("structure", "recover")}
    assert phases == {"structure": 3.0, "recover": 20.0 if layered else 10.0}
    assert list(made.seconds)[:4] == ["prepare", "structure", "recover", "compress"]


# ---------------------------------------------------------------- too little memory
@pytest.mark.slow
def test_what_would_help_is_said(planned: Callable[..., Plan]) -> None:
    def problem(*stages: dict[str, Any], **fields: Any) -> str:
        (found,) = planned(*stages, available=1000, **fields).problems
        return found

    long = {"sequence_length": 128, "samples": 8, "batch_size": 64}
    found = problem(structure(), recover(**long))
    assert "stages.1.recover: set micro_batch below 64, set gradient_checkpointing: true, or use" in found
    assert "recipe.yaml:" in found
    assert "calibration.batch_size" not in found
    found = problem(recover(**long, micro_batch=1, gradient_checkpointing=True))
    assert "micro_batch" not in found
    assert "gradient_checkpointing" not in found
    small: dict[str, Any] = {"sequence_length": 16, "batch_size": 1, "samples": 8}
    large = {"intermediate_size": 4096}
    assert "recover: set teacher: cached, or use" in problem(recover("lora", rank=1, **small), **large)
    assert "recover: use a machine with more" in problem(recover("lora", rank=1, teacher="cached", **small), **large)
    assert "recover: set teacher: cached, use method lora, or" in problem(recover(**small), **large)
    found = problem(structure("taylor"), calibration={"sequence_length": 128})
    assert "structure: taylor has the whole model in memory: lower calibration.sequence_length, " in found
    assert "set reconstruct: false" in problem(structure("wanda"), intermediate_size=2048)
    found = problem(structure("wanda", reconstruct=False), calibration={"batch_size": 64, "samples": 64})
    assert "structure: lower calibration.batch_size" in found


@pytest.mark.slow
def test_training_is_held_against_the_memory_of_the_device_that_trains(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = planned(recover())
    assert (on_cpu.device_memory, on_cpu.available_device_memory) == (0, 0)
    free = [GB]
    monkeypatch.setattr(context, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(footprint, "available_bytes", lambda _: free[0])
    plan = planned(recover())
    assert plan.problems == []
    assert plan.available_device_memory == GB
    # Weights, gradients and moments are the GPU's; copies for checkpoints the machine's. The teacher is stored in float32 too.
    parameters = plan.bytes_before // 4
    assert 20 * parameters < plan.device_memory - footprint.WORKSPACE < on_cpu.peak_memory - footprint.WORKSPACE
    assert plan.peak_memory - footprint.WORKSPACE == 16 * parameters
    free[0] = footprint.WORKSPACE
    (found,) = planned(recover()).problems
    assert "of memory of cuda and may take" in found
    assert "stages.0.recover: " in found
    (found,) = planned(structure("taylor"), calibration={"batch_size": 1}, num_hidden_layers=12).problems
    assert "memory of cuda" in found
    assert "taylor has the whole model in memory" in found
    # States are where blocks are: where they would fill the GPU they spill.
    free[0] = 10**5
    assert planned(structure()).spill
    free[0] = GB
    assert not planned(structure()).spill
    assert planned({"prune": {"method": "magnitude", "sparsity": 0.5}}).device_memory == 0


def test_needs_one_after_the_other_count_once() -> None:
    from compress.model.footprint import Footprint

    one, other = Footprint(5, 1, 2, 10, 1, 3.0, "one"), Footprint(3, 7, 1, 20, 2, 4.0, "other")
    assert one.after(other) == Footprint(5, 7, 2, 30, 3, 7.0, "other")
    assert replace(one, memory=50).after(other).advice == "one"


# ---------------------------------------------------------------- nothing to fit
@pytest.mark.parametrize(
    ("method", "remove", "fields"),
    [("block_influence", "layers", {}), ("magnitude", "layers", {}), ("frequency", "vocabulary", {"keep": 257})],
)
def test_what_cannot_be_fitted_is_not_asked_for(
    make_checkpoint: Any, recipe: Any, tmp_path: Path, method: str, remove: str, fields: dict[str, Any]
) -> None:
    source = make_checkpoint(vocab_size=320)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(source, structure(method, remove, **fields, reconstruct=True))))
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "reconstruct" in text)
    with pytest.raises(RequestError, match=rf"recipe\.yaml:{line}.*structure\.reconstruct: .*{remove}"):
        make_plan(load(file), tmp_path / "out")
    # The default is silent, and so is `false`; written with all its defaults a recipe still says the same.
    for told in ({}, {"reconstruct": False}):
        file.write_text(yaml.safe_dump(recipe(source, structure(method, remove, **fields, **told))))
        loaded = load(file)
        make_plan(loaded, tmp_path / "out")
        file.write_text(yaml.safe_dump(loaded.resolved()))
        again = load(file)
        assert again.resolved() == loaded.resolved()
        make_plan(again, tmp_path / "out")


def test_experts_are_not_fitted_either(recipe: Any, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "mixtral", hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, vocab_size=VOCABULARY,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    stage = structure("routing", "experts", keep=2, reconstruct=True)
    with pytest.raises(RequestError, match=r"structure\.reconstruct: .*experts"):
        make_plan(load(recipe(tmp_path / "model", stage)), tmp_path / "out")
    del stage["structure"]["reconstruct"]
    plan = make_plan(load(recipe(tmp_path / "model", stage)), tmp_path / "out")
    assert "experts 4 -> 2" in plan.headline()
