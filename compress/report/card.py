"""Model card of an artifact: README.md, as the Hugging Face hub shows it. The same manifest gives the same bytes.

It is not hashed in the manifest, so that people can edit it; an edited card is never overwritten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from compress.core.files import write_text
from compress.core.units import size
from compress.evaluate.metrics import Quality
from compress.report.facts import Facts, gather
from runtime.checkpoint.artifact import shown
from runtime.kv_cache.policy.policy import Policy
from runtime.system.self_hash import page_is_whole, sealed_page

FILE = "README.md"
#: Metadata of the source's card that is also true of the compressed model.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
_LONGEST = 200  # characters of an inherited value
_PATH = re.compile(
    r"(?<![\w:/.~])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\:;,]+[/\\])+[^\s/\\:;,]+"
)  # an absolute one, of several parts
_SNAPSHOT = re.compile(r"/models--([\w.-]+)/snapshots/([0-9a-f]+)$")


def describe_source(checkpoint: Path) -> dict[str, Any]:
    """Facts about the source for the card: `repository` and `revision` if it comes from the hub, and under `card` the inherited metadata
    of its README.md."""
    found: dict[str, Any] = {}
    if match := _SNAPSHOT.search(checkpoint.absolute().as_posix()):
        found |= {"repository": match[1].replace("--", "/", 1), "revision": match[2]}
    try:
        data = ModelCard((checkpoint / FILE).read_text(encoding="utf-8"), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # no README.md, or metadata that cannot be parsed
        return found
    kept = {key: data[key] for key in _INHERITED if data.get(key) and len(str(data[key])) <= _LONGEST}
    return found | ({"card": kept} if kept else {})


def write_card(artifact: str | Path) -> Path | None:
    """Write the card of an artifact; None, and nothing is written, if it has an edited card."""
    path = Path(artifact) / FILE
    if path.is_file() and not page_is_whole(path.read_bytes()):
        return None
    with shown(Path(artifact)):
        text = card(gather(artifact))
    write_text(path, text)
    return path


def card(facts: Facts) -> str:
    """The text of a card."""
    manifest, recipe = facts.manifest, yaml.safe_load(facts.recipe) or {}
    source = manifest.get("source") or {}
    readable = manifest.get("readable_by") or []
    name = str(recipe.get("name") or "compressed model")
    base = source.get("repository") or base_name(str(source.get("path_or_id") or "the original"))
    quality = Quality.of(facts.metrics)
    text = _nowhere((manifest.get("evaluation") or {}).get("description") or "held-out text", facts)
    plain = any(reader.get("name") == "transformers" and reader.get("how") == "yes" for reader in readable)
    parts = [
        f"# {name}",
        f"{base}, compressed by the recipe `{name}` with compress {manifest.get('compress_version', '')}.",
        _table(("", "before", "after", ""), [*_sizes(facts), *quality.rows()]),
        f"Quality is measured on {text}." if quality.rows() else "Quality was not evaluated.",
    ]
    if manifest.get("kv_cache"):
        parts.append(f"KV cache: {Policy.parse(manifest['kv_cache']).describe()}.")
    if manifest.get("draft"):
        parts.append(f"It includes a draft for speculative decoding, made by {manifest['draft']['method']}.")
    if facts.warnings:
        parts += ["## Warnings", "\n".join(f"- {_nowhere(warning, facts)}" for warning in facts.warnings)]
    if readable:
        rows = [tuple(str(reader.get(key, "")) for key in ("name", "how", "note")) for reader in readable]
        parts += ["## Readable by", _table(("", "", ""), rows)]
    parts += ["## How to load", *_loading(facts, readable)]
    resolved = yaml.safe_dump(_without_places(recipe), sort_keys=False, allow_unicode=True).rstrip()
    parts += ["## Recipe, as resolved", f"```yaml\n{resolved}\n```"]
    data = ModelCardData(
        base_model=source.get("repository"), base_model_relation="quantized" if source.get("repository") else None,
        library_name="transformers" if plain else "compress", tags=_tags(facts), **_metadata(facts),
        model_name=name, eval_results=_results(quality, text, facts),
    )  # fmt: skip
    return sealed_page(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts))


def _metadata(facts: Facts) -> dict[str, Any]:
    """License, language and pipeline tag, from the source's card if it has them."""
    own = (facts.manifest.get("source") or {}).get("card") or {}
    return {"pipeline_tag": _pipeline(facts), **{key: own[key] for key in _INHERITED if key in own}}


def _pipeline(facts: Facts) -> str | None:
    if "cosine" in facts.metrics:
        return "feature-extraction"
    return "text-generation" if str(facts.architecture).endswith("ForCausalLM") else None


def _tags(facts: Facts) -> list[str]:
    methods = {str(layer.get("method")) for layer in facts.layers if layer.get("method")}
    return ["compress", *sorted({part for method in methods for part in re.split(r"[+, ]+", method) if part})]


def _results(quality: Quality, text: str, facts: Facts) -> list[EvalResult] | None:
    values = {
        "perplexity": quality.after, "kl_divergence": quality.kl, "top1_agreement": quality.top1_agreement,
        "cosine_similarity": quality.cosine,
    }  # fmt: skip
    task = _metadata(facts).get("pipeline_tag") or "text-generation"
    return [
        EvalResult(
            task_type=task, dataset_type="text", dataset_name=text, metric_type=name, metric_value=round(value, 6)
        )
        for name, value in values.items()
        if value is not None
    ] or None


def _sizes(facts: Facts) -> list[tuple[str, str, str, str]]:
    before, after = facts.bytes_before, facts.bytes_after
    rows = [("tensors", size(before), size(after), f"{before / max(after, 1):.2f} times smaller")]
    counted = facts.manifest["bytes"]
    for key, what in (
        ("draft", "draft"),
        ("cache_files", "cache files"),
        ("tokenizer", "tokenizer"),
        ("total", "all that is loaded"),
    ):
        if counted.get(key):
            rows.append((what, "", size(counted[key]), ""))
    return rows


def _loading(facts: Facts, readable: Sequence[Mapping[str, Any]]) -> list[str]:
    how = {str(reader.get("name")): reader for reader in readable}
    blocks = [
        '```python\nimport runtime                                    # of compress\nmodel = runtime.load("PATH")\n```'
    ]
    told = how.get("transformers", {}).get("how")
    if told in ("yes", "with import runtime"):
        first = "import runtime                                    # registers the format\n" if told != "yes" else ""
        kind = "AutoModelForCausalLM" if _pipeline(facts) == "text-generation" else "AutoModel"
        blocks.append(f'```python\n{first}from transformers import {kind}\nmodel = {kind}.from_pretrained("PATH")\n```')
    if how.get("vLLM", {}).get("how") == "yes":
        blocks.append("```bash\nvllm serve PATH\n```")
    return ["PATH is this directory, or its name on the hub.", *blocks]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _without_places(value: Any) -> Any:
    """A recipe with absolute paths reduced to their last component."""
    if isinstance(value, dict):
        return {key: _without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    return base_name(value) if isinstance(value, str) else value


def _nowhere(sentence: str, facts: Facts) -> str:
    """A sentence with local paths reduced to their last component."""
    source = str((facts.manifest.get("source") or {}).get("path_or_id") or "")
    if source:
        sentence = sentence.replace(source, base_name(source))
    return _PATH.sub(lambda found: base_name(found[0]), sentence)


def local_paths(value: Any) -> Iterator[str]:
    """Local paths in the texts of a nested value."""
    if isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from local_paths(each)
    elif isinstance(value, str):
        yield from [value] if base_name(value) != value else _PATH.findall(value)


def base_name(written: str) -> str:
    """Last component of a local path (absolute, or outside the working directory); other texts unchanged."""
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(written).is_absolute() or written.startswith(("~", "..")):
            return kind(written).name
    return written
