"""The commands that look at or run an artifact: eval, inspect, bench, generate, report; their --json, their exit codes."""

from __future__ import annotations

import json
import shutil

import pytest

from compress.cli import main


@pytest.fixture
def artifact(tiny_artifact, tmp_path):
    return shutil.copytree(tiny_artifact, tmp_path / "artifact")


@pytest.fixture
def run(capsys):
    """`run(*arguments)` gives (exit code, stdout, stderr)."""

    def go(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return go


@pytest.fixture
def run_json(run):
    """The one JSON object on stdout of a command that must end well."""

    def go(*arguments):
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return go


class TestEval:
    def test_json(self, run_json, tiny_artifact, tiny_llama, tiny_text):
        options = ("--text", tiny_text, "--sequence-length", 64, "--samples", 4, "--device", "cpu")
        result = run_json("eval", tiny_artifact, *options, "--reference", tiny_llama())
        assert result["tokens"] == 4 * 63
        assert result["perplexity"] > 1
        assert 0 < result["kl"] < 5
        assert 0 < result["top1_agreement"] <= 1
        assert result["bytes"] < result["reference"]["bytes"]
        assert result["text"] == str(tiny_text)

    def test_table(self, run, tiny_artifact, tiny_text):
        code, out, _ = run("eval", tiny_artifact, "--text", tiny_text, "--samples", 2)
        assert code == 0
        assert "perplexity" in out
        assert "254 tokens scored: the file text.txt, 2 rows of 128 tokens." in out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--limit", "3"), "--limit"),
            (("--tasks", "arc_easy", "--reference", "x"), "--reference"),
            (("--tasks", ","), "--tasks"),
            (("--sequence-length", "1"), "--sequence-length"),
            (("--sequence-length", "4096"), "128"),
            (("--text", "nowhere.txt"), "nowhere.txt"),
        ],
    )
    def test_wrong_requests(self, run, tiny_artifact, options, message):
        code, out, err = run("eval", tiny_artifact, *options, "--json")
        assert code == 2
        assert message in json.loads(out)["error"]
        assert message in err

    def test_missing_model(self, run, tiny_artifact):
        code, _, err = run("eval", tiny_artifact.parent / "tiny_w5")
        assert code == 2
        assert f"the nearest directory is {tiny_artifact}" in err


class TestInspect:
    def test_json(self, run_json, tiny_artifact):
        result = run_json("inspect", tiny_artifact, "--verify")
        rows = {row["name"]: row for row in result["tensors"]}
        layer = rows["model.layers.0.mlp.down_proj.weight"]
        assert (layer["action"], layer["format"]) == ("compressed", "pack-quantized")
        assert 4 < layer["bits"] < 5
        assert layer["bytes"] < layer["bytes_before"] / 3
        assert rows["model.norm.weight"]["action"] == "copied"
        assert rows["model.norm.weight"]["format"] == "bfloat16"
        assert sum(row["bytes"] for row in result["tensors"]) == result["tensor_bytes"]
        assert result["verified_files"] > 3

    def test_table(self, run, tiny_artifact):
        code, out, _ = run("inspect", tiny_artifact, "--verify")
        assert code == 0
        assert "pack-quantized" in out
        assert "match their SHA-256" in out

    def test_plain_checkpoint(self, run, run_json, tiny_llama):
        result = run_json("inspect", tiny_llama())
        assert result["compressed"] is False
        assert {"name", "dtype", "shape", "bytes"} == set(result["tensors"][0])
        code, out, _ = run("inspect", tiny_llama())
        assert code == 0
        assert "LlamaForCausalLM" in out

    def test_a_changed_byte_is_found(self, run, artifact):
        shard = sorted(artifact.glob("*.safetensors"))[0]
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        code, out, err = run("inspect", artifact, "--verify", "--json")
        assert code == 1
        assert shard.name in json.loads(out)["error"]
        assert shard.name in err
        assert run("inspect", artifact)[0] == 0  # headers are fine, and nobody asked for more
        code, out, err = run("generate", artifact, "import", "-n", "2")
        assert (code, out) == (2, "")
        assert "corrupt" in err
        assert run("generate", artifact, "import", "-n", "2", "--no-verify")[0] == 0

    def test_a_truncated_file_is_found(self, run, artifact):
        shard = sorted(artifact.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-7])
        code, _, err = run("inspect", artifact, "--verify")
        assert code == 1
        assert shard.name in err

    def test_a_missing_file_is_found(self, run, artifact):
        (artifact / "tokenizer.json").unlink()
        code, _, err = run("inspect", artifact, "--verify")
        assert code == 1
        assert "missing: tokenizer.json" in err

    def test_a_plain_checkpoint_cannot_be_verified(self, run, tiny_llama):
        code, _, err = run("inspect", tiny_llama(), "--verify")
        assert code == 2
        assert "compress.json" in err


class TestGenerate:
    def test_json_is_what_the_runtime_generates(self, run_json, tiny_artifact):
        import runtime

        result = run_json("generate", tiny_artifact, "line 3", "-n", 12)
        assert result["text"] == runtime.load(tiny_artifact).generate("line 3", max_new_tokens=12)
        assert result["stats"]["new_tokens"] == 12

    def test_stream_and_stdin(self, run, tiny_artifact, monkeypatch):
        import io

        code, plain, err = run("generate", tiny_artifact, "line 3", "-n", 12, "--temperature", 1, "--seed", 5)
        assert code == 0
        assert "12 tokens" in err
        monkeypatch.setattr("sys.stdin", io.StringIO("line 3"))
        code, streamed, _ = run("generate", tiny_artifact, "-", "-n", 12, "-T", 1, "--seed", 5, "--stream")
        assert code == 0
        assert streamed == plain

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--stream", "--json"), "--stream"),
            (("--top-p", "7"), "top_p"),
            (("--kernels", "refrence"), "reference"),
            (("--dtype", "float23"), "float32"),
            (("-n", "0"), "--max-new-tokens"),
        ],
    )
    def test_wrong_requests(self, run, tiny_artifact, options, message):
        code, _, err = run("generate", tiny_artifact, "line", *options)
        assert code == 2
        assert message in err


class TestBench:
    @pytest.mark.slow
    def test_json_with_reference(self, run_json, tiny_artifact, tiny_llama):
        options = ("--prompt-tokens", 8, "--new-tokens", 4, "--repeat", 1, "--device", "cpu", "--threads", 1)
        result = run_json("bench", tiny_artifact, *options, "--reference", tiny_llama())
        for side in (result, result["reference"]):
            for key in ("load_seconds", "prefill_tokens_per_second", "decode_tokens_per_second", "peak_bytes"):
                assert side[key] > 0, key
            assert side["threads"] == 1
        assert result["weight_bytes"] < result["reference"]["weight_bytes"]
        assert sum(result["kernels"].values()) == 15  # 7 layers a block, and the head
        assert result["engine"] == "runtime"
        assert result["reference"]["engine"] == "transformers"

    @pytest.mark.slow
    @pytest.mark.usefixtures("warm")
    def test_what_does_not_fit_the_context(self, run, tiny_artifact):
        code, out, _ = run("bench", tiny_artifact, "--prompt-tokens", 200, "--json")
        assert code == 2
        assert "128" in json.loads(out)["error"]


class TestReport:
    def test_page(self, run_json, artifact):
        (artifact / "report.html").unlink()
        assert run_json("report", artifact) == {"written": [str(artifact / "report.html")]}
        assert (artifact / "report.html").is_file()

    def test_comparison(self, run, run_json, tiny_artifact, artifact, tmp_path):
        result = run_json("report", tiny_artifact, artifact, "--plot", tmp_path / "plot.svg")
        assert result["written"] == [str(tmp_path / "plot.svg")]
        assert [row["label"] for row in result["artifacts"]] == ["uncompressed", "tiny_w4", "artifact"]
        code, out, _ = run("report", tiny_artifact, artifact)
        assert code == 0
        assert "uncompressed" in out

    @pytest.mark.parametrize(
        ("options", "message"),
        [(("--plot", "p.jpeg"), ".svg, .png, .pdf"), (("--plot", "p.svg", "--output", "x"), "--output")],
    )
    def test_wrong_requests(self, run, tiny_artifact, options, message):
        code, _, err = run("report", tiny_artifact, *options)
        assert code == 2
        assert message in err
