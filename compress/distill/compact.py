"""Store a trained draft in few bits: it is read for every token that it proposes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from compress.distill.write import KEPT
from compress.pipeline.files import sha256, write_json, written_beside
from runtime.checkpoint import read_json
from runtime.decoding.drafters.draft_model import DRAFT

_GROUP = 128  # of the schemes
_NOT_OF_A_DRAFT = ("report.html", "compress.log", "recipe.yaml")


def compact(source: Path, output: Path, scheme: str, trimmed: bool) -> None:
    """Quantize a draft's directory, round to nearest.

    Args:
        source: of `write_draft`.
        output: new, or an earlier draft's.
        scheme: "W8A16" or "W4A16".
        trimmed: its head is cut down to the kept tokens when it is loaded, and stays as it is here.
    """
    from compress.pipeline.run import apply
    from compress.recipe import load

    config = read_json(source / "config.json")
    widths = ("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim")
    narrow = min((value for key in widths if (value := config.get(key))), default=0)
    quantize: dict[str, Any] = {"method": "rtn", "scheme": scheme, "ignore": ["lm_head"] if trimmed else []}
    if narrow < _GROUP:
        quantize["group_size"] = "channel"
    recipe = load({"name": "draft", "model": str(source.resolve()), "stages": [{"quantize": quantize}]})
    shutil.rmtree(output, ignore_errors=True)
    apply(recipe, output=output, device="cpu", quiet=True)
    for name in _NOT_OF_A_DRAFT:
        (output / name).unlink(missing_ok=True)
    if trimmed:
        with written_beside(output / KEPT) as temporary:
            shutil.copyfile(source / KEPT, temporary)
    facts = read_json(source / DRAFT)
    files = sorted(file for file in output.iterdir() if file.is_file() and file.name != "compress.json")
    facts["files"] = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
    facts["quantized"] = scheme
    (output / "compress.json").unlink(missing_ok=True)
    write_json(output / DRAFT, facts)
