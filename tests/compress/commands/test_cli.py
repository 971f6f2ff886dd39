# ruff: noqa: E501 (a case and its sentence stand in one line)
"""The command line: help, exit codes, one sentence on stderr, one JSON object on stdout."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import compress
from compress import cli
from compress.cli import main
from compress.core.resources import bundled_recipes
from runtime.errors import ArtifactError, CompressError, RequestError


def run(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def failing(monkeypatch):
    """A command line with the one command `apply`, which raises what it is given."""

    def prepare(error):
        def apply(recipe: str = typer.Argument(""), as_json: bool = typer.Option(False, "--json")) -> None:
            raise error

        def build(commands=()):
            app = typer.Typer()
            app.callback()(lambda: None)
            app.command("apply")(apply)
            return app

        monkeypatch.setattr(cli, "build", build)

    return prepare


def fresh(*arguments):
    """A new process, as a user starts one."""
    return subprocess.run(
        [sys.executable, "-m", "compress.cli", *arguments], capture_output=True, text=True, timeout=120
    )


# ------------------------------------------------------------------ help


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"{compress.__version__}\n", "")


def test_help_of_the_program_teaches(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "compress apply llama_w4_sparse" in out
    for name in cli.COMMANDS:
        assert name in out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_each_command_has_help_with_examples(capsys, command):
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "Usage: compress" in out
    assert f"compress {command} " in out.replace("Usage: compress", "")
    assert "--json" in out or command == "chat", "a conversation is no one object"


def test_help_and_recipes_are_quick_and_import_no_torch():
    code = (
        "import sys, time; from compress.cli import main; main({arguments!r}); "
        "heavy = [m for m in ('torch', 'transformers', 'datasets', 'matplotlib') if m in sys.modules]; "
        "print(heavy, time.process_time(), file=sys.stderr)"
    )
    for arguments in (["--help"], ["apply", "--help"], ["recipes"], ["recipes", "show", "llama_w4"], ["aply"]):
        command = [sys.executable, "-c", code.format(arguments=arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        heavy, seconds = done.stderr.splitlines()[-1].rsplit(" ", 1)
        assert heavy == "[]", arguments
        # Measured 0.3 s of processor time (wall time would measure what else the machine does).
        assert float(seconds) < 1, arguments


def test_no_arguments_show_the_help(capsys):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "Usage: compress" in out


def test_shell_completion_is_there():
    done = subprocess.run(
        [sys.executable, "-m", "compress.cli"], capture_output=True, text=True, timeout=60,
        env={"_COMPRESS_COMPLETE": "complete_bash", "COMP_WORDS": "compress apply llama_w4", "COMP_CWORD": "2", "PATH": "/usr/bin"},
    )  # fmt: skip
    expected = sorted(name for name in bundled_recipes() if name.startswith("llama_w4"))
    assert len(expected) > 3
    assert done.stdout.split() == expected, done.stderr


# ------------------------------------------------------------------ wrong requests


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["aply", "x"], "'apply'"),
        (["apply"], "recipe"),
        (["apply", "llama_w4", "--reume"], "--reume"),
        (["apply", "llama_w4", "extra"], "extra"),
        (["apply", "llama_w5"], "'llama_w4'"),
        (["apply", "llama_w4", "--set", "stages.0.quantize.bit=3"], "stages.0.quantize.bit: "),
        (["apply", "llama_w4", "--set", "nonsense"], "--set nonsense: "),
        (["apply", "llama_w4", "--model", "recipes/checkpoint"], "--model recipes/checkpoint: model: "),
        (["plan", "llama_w4", "--set", "stages.0.quantize.targets=[Linaer]"], "'Linear'"),
        (["plan", "llama_w4", "--set", "stages.0.quantize.group_size=4096"], "group_size 4096"),
        (["plan", "llama_w4_sparse", "--set", "stages.0.prune.pattern=2:5"], "'2:5'"),
        (["methods", "show", "gtpq"], "'gptq'"),
        (["methods", "show", "lokup"], "'lookup'"),
        (["bench", "nowhere", "--drafter", "-p", "64"], "--drafter: '-p'"),
        (["generate", "nowhere", "x", "--drafter", "--stream"], "--drafter: '--stream'"),
        (["bench", "nowhere", "--drafter", "lokup"], "'lookup'"),
        (["generate", "nowhere", "x", "--drafter", '["lookup", "nope"]'], "--drafter[1]: "),
        (["bench", "nowhere", "--drafter", '{"method": "lookup", "depth": 0}'], "--drafter.depth: "),
        (["bench", "nowhere", "--drafters", "--text", "nowhere.txt"], "--text nowhere.txt"),
        (["recipes", "show", "lama_w4"], "'llama_w4'"),
        (["recipes", "shw"], "shw"),
    ],
)  # fmt: skip
def test_wrong_requests_exit_2_with_one_sentence(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("compress: ")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["apply", "nope", "--json"],
        ["aply", "--json"],
        ["apply", "--json"],
        ["plan", "llama_w4", "--json", "--set", "x=1"],
    ],
)
def test_with_json_the_error_is_the_one_object_on_stdout(capsys, arguments):
    code, out, err = run(capsys, *arguments)
    assert code == 2
    answer = json.loads(out)
    assert set(answer) == {"error", "exit_code"}
    assert answer["exit_code"] == 2
    assert answer["error"].split(";")[0] in err


# ------------------------------------------------------------------ failures

FAILURES = {
    "compress error": (CompressError("layer 3 failed"), 1, "layer 3 failed"),
    "request": (RequestError("bad path"), 2, "bad path"),
    "artifact": (ArtifactError("corrupt file"), 2, "corrupt file"),
    "full disk": (OSError(errno.ENOSPC, "No space left on device", "/out/model.safetensors"), 1, "the disk is full (/out/model.safetensors); free some space, then run the same command with --resume"),
    "other os error": (PermissionError(errno.EACCES, "Permission denied", "/out"), 1, "Permission denied (/out)"),
    "interrupt": (KeyboardInterrupt(), 130, "interrupted; finished work is kept: run the same command with --resume to continue"),
    "memory": (MemoryError(), 1, "out of memory"),
    "bug": (ZeroDivisionError("division by zero\nsecond line"), 1, "unexpected ZeroDivisionError: division by zero; --debug shows the traceback"),
    "bug without words": (KeyError(), 1, "unexpected KeyError"),
    "abort": (typer.Abort(), 130, "interrupted; finished work"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
@pytest.mark.parametrize("as_json", [False, True])
def test_failures_answer_in_one_sentence(capsys, failing, case, as_json):
    error, code, words = FAILURES[case]
    failing(error)
    found, out, err = run(capsys, "apply", *(["--json"] if as_json else []))
    assert found == code
    assert err.strip().startswith(f"compress: {words}"), err
    assert len(err.strip().splitlines()) == 1
    if as_json:
        assert json.loads(out) == {"error": err.strip().removeprefix("compress: "), "exit_code": code}
    else:
        assert out == ""


def test_a_device_out_of_memory_is_said_so(capsys, failing):
    import torch

    failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    code, _, err = run(capsys, "apply")
    assert code == 1
    assert err.startswith("compress: the device is out of memory; reduce calibration.batch_size")


def test_debug_shows_the_traceback_wherever_it_stands(capsys, failing):
    for arguments in (["--debug", "apply"], ["apply", "--debug"]):
        failing(ZeroDivisionError("oops"))
        code, _, err = run(capsys, *arguments)
        assert code == 1
        assert "Traceback" in err
        assert err.strip().endswith("compress: unexpected ZeroDivisionError: oops")


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m compress.cli recipes show llama_w4 | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "#"


# ------------------------------------------------------------------ recipes and methods


def test_recipes_are_listed_and_shown(capsys):
    code, out, _ = run(capsys, "recipes")
    assert code == 0
    assert "llama_w4_sparse" in out
    code, out, _ = run(capsys, "recipes", "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)["recipes"]}
    assert entries["llama_w4_sparse"]["stages"] == ["prune (sparsegpt)", "quantize (gptq)"]
    code, out, _ = run(capsys, "recipes", "show", "llama_w4")
    assert out == Path(entries["llama_w4"]["path"]).read_text(encoding="utf-8")
    code, out, _ = run(capsys, "recipes", "show", "llama_w4", "--json")
    assert json.loads(out)["recipe"]["name"] == "llama_w4"


def test_sweeps_are_listed_and_shown(capsys):
    assert "llama_bits" in run(capsys, "recipes")[1]
    entries = {entry["name"]: entry for entry in json.loads(run(capsys, "recipes", "--json")[1])["sweeps"]}
    assert entries["llama_bits"]["recipe"] == "llama_w4"
    _, out, _ = run(capsys, "recipes", "show", "llama_bits")
    assert out == Path(entries["llama_bits"]["path"]).read_text(encoding="utf-8")
    _, out, _ = run(capsys, "recipes", "show", "llama_bits", "--json")
    assert json.loads(out)["sweep"]["vary"]["stages.0.quantize.bits"] == {"choices": [3, 4]}


def test_methods_are_listed_and_shown(capsys):
    from compress.distill.draft import METHODS as DRAFT
    from compress.distill.recover import METHODS as RECOVER
    from compress.prune import METHODS as PRUNE
    from compress.prune.structure import METHODS as STRUCTURE
    from compress.quantize import METHODS as QUANTIZE
    from compress.quantize.transforms import METHODS as TRANSFORMS
    from compress.rotate import METHODS as ROTATE

    code, out, _ = run(capsys, "methods", "--json")
    assert code == 0
    listed = {(entry["stage"], entry["name"]) for entry in json.loads(out)["methods"]}
    weights = {*(("prune", name) for name in PRUNE), *(("quantize", name) for name in QUANTIZE)}
    transforms = {("quantize input_transform", name) for name in TRANSFORMS}
    drafts = {("draft", name) for name in DRAFT}
    models = {
        (stage, name)
        for stage, methods in (
            ("structure", STRUCTURE),
            ("rotate", ROTATE),
            ("permute", ["activation"]),
            ("recover", RECOVER),
        )
        for name in methods
    }
    assert {
        (stage, name) for stage, name in listed if not stage.startswith(("kv_cache", "drafter"))
    } == weights | transforms | drafts | models
    code, out, _ = run(capsys, "methods")
    assert "sparsegpt" in out
    for _, name in weights:
        code, out, _ = run(capsys, "methods", "show", name)
        assert code == 0
        assert "Source: " in out
        assert "targets: a list of texts" in out
    for _, name in transforms:
        code, out, _ = run(capsys, "methods", "show", name)
        assert code == 0
        assert f"quantize: {{method: ..., input_transform: {name}}}" in out
        assert "arXiv" in out
    for stage, name in models:
        code, out, _ = run(capsys, "methods", "show", name)
        assert code == 0
        assert "Source: " in out
        fields = {"structure": "ratio: a number", "rotate": "hidden: true or false", "recover": "squarehead: a number"}
        assert fields.get(stage, "method: activation") in out
    for name in DRAFT:
        code, out, _ = run(capsys, "methods", "show", name)
        assert code == 0
        assert "Source: " in out
        assert "samples: an integer" in out


def test_methods_of_the_cache_are_listed_with_their_fields(capsys):
    from runtime.kv_cache.policy.presets import PRESETS

    _, out, _ = run(capsys, "methods", "--json")
    entries = [entry for entry in json.loads(out)["methods"] if entry["stage"].startswith("kv_cache")]
    assert {entry["name"] for entry in entries if entry["stage"] == "kv_cache"} == set(PRESETS)
    assert {"snapkv", "pyramid", "adaptive", "int4", "quest"} <= {
        e["name"] for e in entries if e["stage"] != "kv_cache"
    }
    assert all(entry["summary"] for entry in entries)
    for name in {entry["name"] for entry in entries}:
        code, out, _ = run(capsys, "methods", "show", name, "--json")
        assert code == 0
        shown = json.loads(out)
        for method in shown.get("methods", [shown]):
            assert method["description"]
            assert all(field["description"] for field in method["fields"]), (name, method["fields"])
    code, out, _ = run(capsys, "methods", "show", "layer-defensivekv")
    assert "evict.prior: a number between 0 and 1 (default: 1.0)" in out
    assert "evict.layers.safeguard" in out


def test_drafters_are_listed_with_their_fields(capsys):
    from runtime.drafting.config.registry import DRAFTERS, LENGTHS, RULES, drafters

    _, out, _ = run(capsys, "methods", "--json")
    entries = [entry for entry in json.loads(out)["methods"] if entry["stage"].startswith("drafter")]
    listed = {(entry["stage"], entry["name"]) for entry in entries}
    assert listed == {
        *(("drafter", name) for name in DRAFTERS.names),
        *(("drafter acceptance", name) for name in RULES.names),
        *(("drafter lengths", name) for name in LENGTHS.names),
    }
    assert all(entry["summary"] for entry in entries)
    for stage, name in listed:
        code, out, _ = run(capsys, "methods", "show", name, "--json")
        assert code == 0
        shown = json.loads(out)
        (method,) = [each for each in shown.get("methods", [shown]) if each["stage"] == stage]
        assert method["description"]
        assert method["written"].startswith("drafter: {")
        assert all(field["description"] for field in method["fields"]), (name, method["fields"])
        assert "arXiv" in method["paper"] or name in (*(m.name for m in drafters("drafters")), "fixed")
    code, out, _ = run(capsys, "methods", "show", "lookup")
    assert out.startswith("drafter: {method: lookup}\n")
    assert "longest: an integer between 1 and 64 (default: 8)" in out
    assert "Source: prompt lookup: Saxena" in out
    assert "2304.04487" in out
    _, out, _ = run(capsys, "methods", "show", "early-exit")
    assert "layer: an integer at least 1 or auto (default: auto)" in out
    assert "every: an integer at least 1 (default: 4)\n      With auto: " in out
    _, out, _ = run(capsys, "methods", "show", "skip")
    assert "draft: {method: skip}" in out
    assert "drafter: {method: skip}" in out
    assert "skip_mlp: a list of integers at least 0 (default: [])\n      those whose" in out


def test_methods_are_grouped_in_the_order_of_a_recipe(capsys):
    _, out, _ = run(capsys, "methods", "--json")
    groups = json.loads(out)["groups"]
    names = [group["stage"] for group in groups if " " not in group["stage"]]
    assert names == ["structure", "rotate", "permute", "recover", "prune", "quantize", "kv_cache", "draft", "drafter"]
    _, out, _ = run(capsys, "methods")
    places = [out.index(f"{group['stage']}: {group['summary']}") for group in groups]
    assert places == sorted(places)
    for group in groups:
        code, out, _ = run(capsys, "methods", "show", group["stage"])
        assert code == 0
        assert out.startswith(f"{group['written']}\n")
        _, out, _ = run(capsys, "methods", "show", group["stage"], "--json")
        shown = json.loads(out)
        assert shown["methods"]
        assert all(field["description"] for field in shown["fields"])
    _, out, _ = run(capsys, "methods", "show", "quantize", "--json")
    names = [field["name"] for field in json.loads(out)["fields"]]
    assert {"scheme", "bits", "group_size", "targets", "ignore"} <= set(names)
    assert "damping" not in names, "only gptq has it"
    code, _, err = run(capsys, "methods", "show", "quantise")
    assert code == 2
    assert "'quantize'" in err


def test_a_method_says_its_fields(capsys):
    _, out, _ = run(capsys, "methods", "show", "gptq", "--json")
    shown = json.loads(out)
    fields = {field["name"]: field for field in shown["fields"]}
    assert fields["bits"]["type"] == "a number between 2 and 8"
    assert fields["sweeps"]["type"] == "an integer between 0 and 100"
    assert fields["damping"]["default"] == "0.01"
    assert "2210.17323" in shown["paper"]
    assert all(field["description"] for field in shown["fields"])


@pytest.mark.slow
def test_the_first_compilation_is_said_on_stderr_and_only_there(tmp_path):
    script = (
        "import sys; from pathlib import Path; from compress import cli\n"
        "from runtime.system import native\n"
        "def run(arguments):\n"
        "    native.library(Path(arguments[0])); native.library(Path(arguments[1])); return 0\n"
        "cli._run = run\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    for name in ("one", "two"):
        (tmp_path / f"{name}.c").write_text(f"int {name}(void) {{ return 1; }}\n")
    command = [sys.executable, "-c", script, tmp_path / "one.c", tmp_path / "two.c"]

    def stderr(*options, cache):
        environment = os.environ | {"COMPRESS_CACHE": str(tmp_path / cache)}
        done = subprocess.run(
            [*command, *options], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == ""
        return done.stderr

    assert stderr(cache="a").count("compiling the CPU kernels") == 1
    assert stderr(cache="a") == "", "it is in the cache now"
    assert stderr("--quiet", cache="b") == ""


# ------------------------------------------------------------------ apply and plan around the pipeline


@pytest.fixture
def pipeline(monkeypatch, tmp_path):
    """The pipeline replaced by one that notes how it was called."""
    from compress.run import run as module

    calls = []

    def apply(recipe, **options):
        calls.append((recipe, options))
        print("a library that prints")
        metrics = {
            "before": {"perplexity": 10.0}, "after": {"perplexity": 12.0}, "perplexity_increase": 0.2, "kl": 0.05,
            "top1_agreement": 0.9, "limits": [],
        }  # fmt: skip
        result = module.AppliedArtifact(
            tmp_path / "out",
            metrics,
            {"bytes": {"before": 8_000_000, "after": 2_000_000}},
            {"compress": 61.0},
            5 * 10**8,
            prompts=[recipe.sample],
        )
        if recipe.name == "over":
            raise module.LimitError("max_kl is 0.05, the limit is 0.01", result)
        return result

    monkeypatch.setattr(module, "apply", apply)

    def make_samples(artifact, source, prompts, device, limit, note):
        texts = [f"{prompt} and so on" for prompt in prompts]
        left_out = {"source": "it is too large"}
        return {
            "prompts": prompts,
            "tokens": 48,
            "source": None,
            "artifact": texts,
            "left_out": left_out,
            "engine": "cpu: here",
            "speed": [
                {"how": "with its compressed cache", "tokens_per_second": 44.9, "tokens": 48, "engine": "here"},
                {"how": "with a plain cache", "tokens_per_second": 1892.0, "tokens": 48, "engine": "there"},
            ],
        }

    monkeypatch.setattr("compress.run.record.make_samples", make_samples)
    monkeypatch.setattr("compress.recipe.locate_model", lambda recipe: tmp_path / "m")
    return calls


@pytest.fixture
def recipe(tmp_path):
    def make(name):
        path = tmp_path / "r.yaml"
        path.write_text(f"name: {name}\nmodel: m\nsample: Once\nstages:\n  - quantize: {{method: rtn}}\n")
        return path

    return make


def test_apply_hands_its_options_on(capsys, pipeline, recipe, tmp_path):
    code, out, _ = run(
        capsys, "apply", recipe("fine"), "--model", "other", "-o", tmp_path / "x", "--set", "seed=3", "--resume", "--overwrite", "--device", "cpu", "-q",
        "--max-memory", "3GB",
    )  # fmt: skip
    assert code == 0
    ((loaded, options),) = pipeline
    assert (loaded.model, loaded.seed, loaded.output_directory) == ("other", 3, tmp_path / "x")
    assert callable(options.pop("readers"))
    command = options.pop("command")
    assert command.startswith("compress apply ")
    assert command.endswith("--device cpu -q --max-memory 3GB")
    expected = {"resume": True, "overwrite": True, "device": "cpu", "quiet": True, "max_memory": 3_000_000_000}
    assert options == expected | {"report_to": None}
    for words in (
        "8.00 MB",
        "2.00 MB",
        "4.00 times smaller",
        "+20.00%",
        "90.00%",
        "compress 1 min 01 s",
        "500.00 MB",
        'The artifact continues "Once":\nOnce and so on',
        "The source has no sample output: it is too large",
        "Decodes 45 tokens/s with its compressed cache, 1,892 with a plain cache (48 tokens, on this machine; a rough figure; engines: here, there).",
        "compress generate",
    ):
        assert words in out


def test_apply_with_json_prints_one_object(capsys, pipeline, recipe):
    code, out, err = run(capsys, "apply", recipe("fine"), "--json", "--prompt", "Say")
    assert code == 0
    answer = json.loads(out)
    assert answer["bytes"] == {"before": 8_000_000, "after": 2_000_000}
    assert answer["sample"] == {"prompt": "Say", "text": "Say and so on", "engine": "cpu: here"}
    assert "a library that prints" in err
    assert "error" not in answer


def test_apply_without_a_sample(capsys, pipeline, recipe):
    _, out, _ = run(capsys, "apply", recipe("fine"), "--json", "--prompt", "")
    assert "sample" not in json.loads(out)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_limit_that_is_exceeded_fails_after_the_summary(capsys, pipeline, recipe, as_json):
    code, out, err = run(capsys, "apply", recipe("over"), *(["--json"] if as_json else []))
    assert code == 1
    assert err.strip().endswith("compress: max_kl is 0.05, the limit is 0.01")
    if as_json:
        answer = json.loads(out)
        assert (answer["error"], answer["exit_code"]) == ("max_kl is 0.05, the limit is 0.01", 1)
        assert answer["metrics"]["kl"] == 0.05
    else:
        assert "+20.00%" in out


def test_python_apply_and_plan_hand_on_too(pipeline, recipe, monkeypatch):
    artifact = compress.apply(recipe("fine"), model="other", output="here", set=["seed=4"], resume=True)
    assert artifact.metrics["kl"] == 0.05
    loaded, options = pipeline[0]
    assert (loaded.model, str(loaded.output_directory), loaded.seed) == ("other", "here", 4)
    assert options["resume"] is True
    monkeypatch.setattr(
        "compress.run.plan.make_plan",
        lambda recipe, max_memory, readers, allocate: SimpleNamespace(
            name=recipe.name, limit=max_memory, allocate=allocate
        ),
    )
    assert compress.plan(recipe("fine")).name == "fine"
    assert compress.plan(recipe("fine"), max_memory="2GB").limit == 2_000_000_000
    assert [compress.plan(recipe("fine"), allocate=wanted).allocate for wanted in (False, True)] == [False, True]


def test_import_compress_is_light():
    code = (
        "import sys, compress; print([m for m in ('torch', 'transformers', 'pydantic', 'typer') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_program_exits_with_the_code():
    assert fresh("recipes").returncode == 0
    assert fresh("aply").returncode == 2


def test_help_imports_nothing_heavy():
    script = "import sys\nfrom compress.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
    script += (
        "print(sorted({'torch', 'transformers', 'numpy', 'datasets', 'matplotlib', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "[]"
