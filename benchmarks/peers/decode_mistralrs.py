"""mistral.rs: the checkpoint, quantized as it loads (`isq` in the request); prompts as text, a word a token; the clock is its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from decode_common import Generate, main, measure_prompts


def prepare(request: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint again, by links, with a config.json of the older kind."""
    source, path = Path(request["model"]), Path(request["path"])
    path.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name != "config.json" and not (path / file.name).exists():
            (path / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))
    return {}


def load(request: dict[str, Any]) -> Generate:
    from mistralrs import Architecture, CompletionRequest, Runner, Which

    mixture = json.loads((Path(request["path"]) / "config.json").read_text())["model_type"] == "mixtral"
    which = Which.Plain(model_id=request["path"], arch=Architecture.Mixtral if mixture else Architecture.Llama)
    runner = Runner(which=which, in_situ_quant=request["isq"], prefix_cache_n=0, max_seqs=1)

    def generate(ids: list[int], new: int) -> tuple[float, float]:
        asked = CompletionRequest(
            prompt=" ".join(f"t{each}" for each in ids), model="default", max_tokens=new + 1, temperature=0.0,
            ignore_eos=True,
        )  # fmt: skip
        usage = runner.send_completion_request(asked).usage
        if abs(usage.prompt_tokens - len(ids)) > 1 or usage.completion_tokens != new + 1:  # it may add <s>
            raise RuntimeError(
                f"{usage.prompt_tokens} and {usage.completion_tokens} tokens, not {len(ids)} and {new + 1}"
            )
        return usage.total_prompt_time_sec, usage.total_completion_time_sec

    return generate


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["RAYON_NUM_THREADS"] = str(json.loads(sys.argv[1])["threads"])  # read when its pool is made
    main({"prepare": prepare, "depths": lambda request: measure_prompts(request, load)}, "mistralrs")
