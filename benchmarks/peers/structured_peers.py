#!/usr/bin/env python
"""Structured pruning by other libraries: the cells of benchmarks/structured.py. Runs in the peer's own environment.

    python structured_peers.py PEER --text train.txt [--model CHECKPOINT] [--heldout TEXT] >> lines.jsonl
    python structured_collect.py --text train.txt --lines *.jsonl --output ../results/structured_peers.json

With a mixture of experts as CHECKPOINT (`structured_model.py --family moe`) `none` and `llmcompressor` have cells: experts are removed.
PEER is one of `none` (the checkpoint as it is), `torch-pruning`, `optipfair`, `amd-quark`, `fmchisel`,
`nvidia-modelopt` and `llmcompressor`. It prints one JSON line a cell. Every environment is made alike, e.g.

    python3.11 -m venv quark && quark/bin/pip install torch==2.13.0 transformers safetensors accelerate amd-quark==0.13

with torch-pruning==1.6.1, optipfair==0.4.2, llmcompressor==0.14.0.1 or nvidia-modelopt[hf]==0.47.0 and torchprofile==0.0.4 in the place
of amd-quark. fmchisel 0.1.2 asks for torch < 2.8; `pip install llmcompressor==0.5.1 dataclasses_json "datasets<5" "pyarrow<21"
"numpy<2"`, then `pip install --no-deps fmchisel==0.1.2`, gives it a newer one.

Calibration rows and held-out rows are the ones that `compress` draws from the same texts. A peer gets the weights in float32; what it
made is rounded to bfloat16 and computed with in bfloat16, as `compress` saves and evaluates (`none` must give what it reports). Channels
are brought down to the numbers that `compress` keeps (multiples of 32), so that cells of one ratio have one size, where the peer can.
`ratio` is what structured.py asks for; `parameters_after` is what is there, without whole channels and groups of heads that a peer only
fills with zeros (`zeroed` then says so). `seconds` are those of the pruning, calibration included.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from structured_cells import LENGTH, Bench, parts, tokenizer_of

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = ROOT / "recipes" / "checkpoints" / "stdlib-4m"
HELDOUT = ROOT / "recipes" / "checkpoints" / "texts" / "heldout.txt"
RATIOS = (0.1, 0.2, 0.35, 0.5)


def none(bench: Bench) -> None:
    """The checkpoint as it is: what `compress` reports before anything is removed."""
    bench.cell("none", "none", 0.0, lambda model: model)


def torch_pruning(bench: Bench) -> None:
    """Its dependency graph and group importances, of channels."""
    import torch_pruning as tp

    importances: dict[str, Callable[[], Any]] = {
        "magnitude": tp.importance.MagnitudeImportance,
        "taylor": tp.importance.TaylorImportance,
        "hessian": tp.importance.HessianImportance,
        "activation": lambda: tp.importance.ActivationImportance(target_types=[torch.nn.Linear]),
    }

    def ranked(name: str, model: Any) -> Any:
        made = importances[name]()
        if name == "taylor":
            bench.gradients(model)
        elif name == "hessian":
            for ids in bench.rows.split(1):
                model.zero_grad()
                model(ids, labels=ids, use_cache=False).loss.backward()
                made.accumulate_grad(model)
        elif name == "activation":  # what it has seen last is what counts, so it sees all at once
            with torch.no_grad(), made.compute_importance(model):
                model.model(bench.rows, use_cache=False)
        return made

    def narrowed(model: Any, name: str, ratio: float) -> None:
        importance = ranked(name, model)
        stays: list[Any] = [model.lm_head, model.model.embed_tokens]
        for attention, mlp in parts(model):
            stays += [attention, mlp.down_proj]
        pruner = tp.pruner.BasePruner(
            model,
            {"input_ids": bench.rows[:1, :16], "use_cache": False},
            importance=importance,
            pruning_ratio=1 - (bench.kept(ratio) + 0.5) / bench.config["intermediate_size"],
            ignored_layers=stays,
            output_transform=lambda out: out.logits,
        )
        pruner.step()
        model.zero_grad()

    for name in importances:
        for ratio in RATIOS:
            bench.cell(name, "ffn", ratio, partial(narrowed, name=name, ratio=ratio))


def optipfair(bench: Bench) -> None:
    """Its importances of GLU channels, with and without calibration; the layer that turns the stream least."""
    import optipfair as library

    quiet: dict[str, Any] = {"show_progress": False}

    def narrowed(model: Any, method: str, ratio: float, data: Any) -> Any:
        width = bench.config["intermediate_size"]
        share = 100 * (width - bench.kept(ratio) + 0.5) / width
        how = {"neuron_selection_method": method, "pruning_percentage": share, "dataloader": data}
        return library.prune_model(model, pruning_type="MLP_GLU", **how, **quiet)

    def shallower(model: Any, method: str) -> Any:
        if method == "last":
            return library.prune_model(model, pruning_type="DEPTH", num_layers_to_remove=1, **quiet)
        found = library.analyze_layer_importance(model, bench.batches(), **quiet)
        least = min(found, key=found.get)
        return library.prune_model(model, pruning_type="DEPTH", layer_indices=[int(least)], **quiet)

    methods = {"MAW": "MAW", "VOW": "VOW", "PON": "PON", "L2": "L2", "MAW + activations": "MAW"}
    for name, method in methods.items():
        data = bench.batches() if "activations" in name else None
        for ratio in RATIOS:
            bench.cell(name, "ffn", ratio, partial(narrowed, method=method, ratio=ratio, data=data))
    for name in ("cosine importance", "last"):
        bench.cell(name, "layers", 0.25, partial(shallower, method=name))


def amd_quark(bench: Bench) -> None:
    """OSSCAR, alone and with its block-wise tuning; the layer without which the calibration text is likeliest.

    OSSCAR rounds widths to multiples of 128: of a fifth of 768 channels it makes a sixth, and of a tenth as well.
    """
    from quark.torch.algorithm.config import BlockwiseTuningConfig
    from quark.torch.pruning.api import ModelPruner
    from quark.torch.pruning.config import LayerImportancePruneConfig, OSSCARConfig, PConfig

    data = list(bench.rows.split(1))
    inside = ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.o_proj"]
    inside += ["mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"]

    def narrowed(model: Any, ratio: float, tuned: bool) -> Any:
        algorithm = OSSCARConfig(
            inside_layer_modules=inside,
            mlp_pruning_modules=["mlp.down_proj"],
            mlp_scaling_layers={"mlp.down_proj": ["mlp.up_proj", "mlp.gate_proj"]},
            mlp_pruning_ratio=ratio,
            mlp_intermediate_size_name="intermediate_size",
            model_decoder_layers="model.layers",
        )
        tuning = BlockwiseTuningConfig(model_decoder_layers="model.layers", trainable_modules=["mlp.down_proj"])
        wanted = PConfig(algo_config=algorithm, blockwise_tuning_config=tuning if tuned else None)
        return ModelPruner(wanted).pruning_model(model, data)

    def shallower(model: Any) -> Any:
        algorithm = LayerImportancePruneConfig(
            delete_layer_num=1,
            layer_num_field="num_hidden_layers",
            model_decoder_layers="model.layers",
            layer_norm_field="model.norm",
        )
        return ModelPruner(PConfig(algo_config=algorithm)).pruning_model(model, data)

    for name, tuned in (("osscar", False), ("osscar + block-wise tuning", True)):
        for ratio in RATIOS[1:]:
            bench.cell(name, "ffn", ratio, partial(narrowed, ratio=ratio, tuned=tuned))
    bench.cell("perplexity without it", "layers", 0.25, shallower)


def dataset(bench: Bench) -> Any:
    """Calibration rows as llm-compressor reads them."""
    from datasets import Dataset

    rows = bench.rows.tolist()
    return Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * LENGTH for _ in rows]})


def fmchisel(bench: Bench) -> None:
    """OSSCAR as a modifier of llm-compressor: columns of down_proj, and of o_proj in groups of heads, zeroed and the rest refitted."""
    from fmchisel.pruning.osscar.base import OSSCARModifier
    from llmcompressor import oneshot

    def pruned(model: Any, channels: int, groups: int) -> None:
        modifier = OSSCARModifier(num_drop_mlp_neuron=channels, num_drop_attn_group=groups, ignore=["re:.*lm_head"])
        fields: dict[str, Any] = {"max_seq_length": LENGTH, "num_calibration_samples": len(bench.rows)}
        oneshot(model=model, tokenizer=tokenizer_of(bench.model), dataset=dataset(bench), recipe=[modifier], **fields)

    width = bench.config["intermediate_size"]
    for ratio in RATIOS:
        bench.cell("osscar", "ffn", ratio, partial(pruned, channels=width - bench.kept(ratio), groups=0))
    groups = bench.config["num_key_value_heads"] // 2
    bench.cell("osscar", "heads", 0.5, partial(pruned, channels=0, groups=groups))


def modelopt(bench: Bench) -> None:
    """FastNAS, whose tracer finds the channels of the MLPs and nothing else of a Llama, with a bound on the parameters.

    The score of a width is the likelihood of a quarter of the calibration rows. Widths differ between layers.
    """
    from modelopt.torch.prune import prune

    rows = bench.rows[: len(bench.rows) // 4]

    @torch.no_grad()
    def score(model: Any) -> float:
        losses = [float(model(ids, labels=ids, use_cache=False).loss) for ids in rows.split(8)]
        return -sum(losses) / len(losses)

    def narrowed(model: Any, ratio: float, checkpoint: Path) -> Any:
        width, hidden = bench.config["intermediate_size"], bench.config["hidden_size"]
        # It counts tied weights twice.
        before = sum(each.numel() for _, each in model.named_parameters(remove_duplicate=False))
        limit = before - (width - bench.kept(ratio)) * 3 * hidden * bench.config["num_hidden_layers"]
        # The search space is made anew for each bound, what it measured is read back: the first cell has paid for it.
        config = {"score_func": score, "checkpoint": str(checkpoint), "verbose": False}
        found, _ = prune(model, "fastnas", constraints={"params": limit}, dummy_input=rows[:1], config=config)
        return found

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory) / "search.pth"
        for ratio in RATIOS:
            bench.cell("fastnas", "ffn", ratio, partial(narrowed, ratio=ratio, checkpoint=checkpoint))


def llmcompressor(bench: Bench) -> None:
    """No structured pruning of a dense model and no recovery: the one-shot unstructured methods; of a mixture, experts.

    Of a Qwen3-MoE it traces, it makes the causal mask for another attention than it then computes with, and gets none: while it
    calibrates, a token sees those after it. A mask that is handed over is used as it is: both are measured.
    """
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import repack_moe
    from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
    from llmcompressor.modifiers.pruning.reap import REAPPruningModifier

    def run(model: Any, modifier: Any, data: Any) -> None:
        fields: dict[str, Any] = {"max_seq_length": LENGTH, "num_calibration_samples": len(bench.rows)}
        oneshot(model=model, tokenizer=str(bench.model), dataset=data, recipe=[modifier], **fields)

    def fewer(model: Any, ratio: float, data: Any, kept: list[Any]) -> Any:
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "kept.json"
            run(model, REAPPruningModifier(sparsity=ratio, report_path=str(report)), data)
            kept += json.loads(report.read_text()).values()
        return repack_moe(model)  # it takes the experts apart; whole, they compute as they do for `compress`

    if not bench.mixture:
        for name, kind in (("sparsegpt", SparseGPTModifier), ("wanda", WandaPruningModifier)):
            modifier = kind(sparsity=0.5, ignore=["re:.*lm_head"])
            bench.cell(name, "weights", 0.5, partial(run, modifier=modifier, data=dataset(bench)))
        return
    mask = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)
    masked: Any = [{"input_ids": ids, "attention_mask": mask} for ids in bench.rows.split(1)]
    rows = {"reap": dataset(bench), "reap + causal mask": torch.utils.data.DataLoader(masked, batch_size=None)}
    for name, data in rows.items():
        for ratio in (0.25, 0.5):
            kept: list[Any] = []
            bench.cell(name, "experts", ratio, partial(fewer, ratio=ratio, data=data, kept=kept), experts=kept)


PEERS: dict[str, Callable[[Bench], None]] = {
    "none": none, "torch-pruning": torch_pruning, "optipfair": optipfair, "amd-quark": amd_quark, "fmchisel": fmchisel,
    "nvidia-modelopt": modelopt, "llmcompressor": llmcompressor,
}  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--text", type=Path, required=True, help="to calibrate on")
    parser.add_argument("--rows", type=int, default=128, help="of the text, 256 tokens each")
    parser.add_argument("--model", type=Path, default=BUNDLED)
    parser.add_argument("--heldout", type=Path, default=HELDOUT)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable(logging.WARNING)
    # Some peers print to standard output; their words go to standard error.
    out, sys.stdout = sys.stdout, sys.stderr
    PEERS[arguments.peer](Bench(arguments, out))


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
