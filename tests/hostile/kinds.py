"""The kinds of files that come from elsewhere: a good one of each, how it is changed, and who reads it."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutations

Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Kind:
    """Of file.

    Attributes:
        names: files that are changed, one at a time. directory: a good one.
        read: what reads it.
    """

    names: tuple[str, ...]
    directory: str
    change: Change
    read: Callable[[Path], Any]


def _header(directory: Path) -> None:
    from runtime.checkpoint.headers import read_header

    read_header(directory / "model.safetensors")


def _checkpoint(directory: Path) -> None:
    from runtime.checkpoint.checkpoint import Checkpoint

    checkpoint = Checkpoint(directory)
    for name in checkpoint.names()[:3]:
        checkpoint.get(name)
    checkpoint.fingerprint()


def _inspect(directory: Path) -> None:
    from compress.commands.inspect import describe
    from compress.report.html import page
    from runtime.checkpoint.artifact import Artifact

    artifact = Artifact(directory)
    describe(artifact)
    artifact.verify()
    page(directory)


def _inspect_unsealed(directory: Path) -> None:
    """As if whoever has changed a file had sealed it again."""
    from compress.commands.inspect import describe
    from compress.report.html import page
    from runtime.checkpoint.artifact import Artifact

    describe(Artifact(directory))
    page(directory)


def _load(directory: Path) -> None:
    import runtime

    model = runtime.load(directory, device="cpu", verify=False)
    model.generate([1, 2, 3], max_new_tokens=2)


def _config(directory: Path) -> None:
    import torch

    from runtime.modeling.skeleton import build_skeleton, read_config

    build_skeleton(read_config(directory), torch.float32)


def _tokenizer(directory: Path) -> None:
    import runtime

    model = runtime.load(directory, device="cpu", verify=False)
    model.generate("line 1: the square", max_new_tokens=1)


def _recipe(directory: Path) -> None:
    from compress.recipe import load

    load(directory / "recipe.yaml")


def _plan(directory: Path) -> None:
    import compress

    compress.plan(directory / "recipe.yaml")


def _plan_model(directory: Path) -> None:
    import compress

    compress.plan(
        {"name": "x", "model": str(directory), "stages": [{"quantize": {"method": "rtn", "bits": 4, "group_size": 16}}]}
    )


def _policy(directory: Path) -> None:
    from runtime.checkpoint.checkpoint import read_json
    from runtime.kv_cache.policy.policy import Policy

    Policy.parse(read_json(directory / "policy.json")).describe()


def _export(directory: Path) -> None:
    import runtime

    runtime.load(directory, device="cpu", verify=False)


def _yaml(raw: bytes, chooser: random.Random) -> bytes:
    if chooser.random() < 0.1:
        return chooser.choice(BOMBS)
    if chooser.random() < 0.6:
        import yaml

        changed = mutations.in_json(yaml.safe_load(raw), chooser)
        try:
            return yaml.safe_dump(changed, sort_keys=False).encode("utf-8", "surrogatepass")
        except (yaml.YAMLError, RecursionError):
            return mutations.dumped(changed)
    return mutations.in_bytes(raw, chooser)


_LAUGHS = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 12))
BOMBS = (
    f"l0: &l0 lol\n{_LAUGHS}\nname: *l11\n".encode(),
    b"a: &a [*a]\n",
    b"a: &a\n  <<: *a\n",
    b"name: !!python/object/apply:os.system ['touch hacked']\n",
    b"!!python/object/new:subprocess.Popen [['touch', 'hacked']]\n",
    b"name: !!python/name:os.system\n",
    b"[" * 100_000,
    b"{a: " * 50_000,
    b"- " * 50_000,
    b"? " * 20_000,
    b"name: " + b"x" * 2_000_000,
    b"\xff\xfe\x00",
    b"%YAML 9.9\n---\nname: x\n",
    b"name: x\n--- \nname: y\n",
    b"name: &a " + b"&b " * 1000,
    b"name: 0x" + b"f" * 5000,
    b"name: " + b"9" * 100_000,
    b"name: 2001-99-99\n",
    b"name: !!binary =====\n",
)

_JSON = mutations.in_json_file
KINDS: dict[str, Kind] = {
    "safetensors header": Kind(("model.safetensors",), "model", mutations.in_safetensors, _header),
    "checkpoint": Kind(("model.safetensors",), "model", mutations.in_safetensors, _checkpoint),
    "index": Kind(("model.safetensors.index.json",), "artifact", _JSON, _checkpoint),
    "compress.json, verified": Kind(("compress.json",), "artifact", _JSON, _inspect),
    "compress.json": Kind(("compress.json",), "artifact", _JSON, _inspect_unsealed),
    "compress.json, loaded": Kind(("compress.json",), "artifact", _JSON, _load),
    "config.json": Kind(("config.json",), "model", _JSON, _config),
    "config.json, loaded": Kind(("config.json", "generation_config.json"), "artifact", _JSON, _load),
    "generation_config.json, planned": Kind(("generation_config.json",), "model", _JSON, _plan_model),
    "tokenizer": Kind(("tokenizer.json", "tokenizer_config.json"), "model", _JSON, _tokenizer),
    "recipe": Kind(("recipe.yaml",), "recipe", _yaml, _recipe),
    "recipe, planned": Kind(("recipe.yaml",), "recipe", _yaml, _plan),
    "cache policy": Kind(("policy.json",), "policy", _JSON, _policy),
    "draft": Kind(("draft/draft.json", "draft/config.json", "drafter.json"), "artifact", _JSON, _load),
    "export.json": Kind(("export.json",), "export", _JSON, _export),
}


def make_good(room: Path) -> None:
    """A checkpoint, an artifact with a draft, an export, a recipe and a policy, each in a directory of its own."""
    from runs import make_request

    import compress
    from export import export
    from runtime.kv_cache.policy.policy import Policy

    request = make_request(room, "draft")
    made = compress.apply(request, output=room / "artifact", quiet=True)
    (room / "artifact" / "drafter.json").write_text(
        json.dumps({"schema_version": 1, "drafter": "lookup", "fingerprint": "f", "draft": None, "machine": "m"})
    )
    export(made.path, "huggingface", room / "export", verify=False, quiet=True)
    (room / "recipe").mkdir()
    shutil.copyfile(room / "artifact" / "recipe.yaml", room / "recipe" / "recipe.yaml")
    (room / "policy").mkdir()
    policy = Policy.parse({"keys": "int4", "values": "int4", "recent": 16})
    (room / "policy" / "policy.json").write_text(json.dumps(policy.resolved()))
    (room / mutations.OUTSIDE).mkdir()
    (room / mutations.OUTSIDE / "secret.json").write_text('{"secret": true}')
    shutil.copyfile(room / "model" / "model.safetensors", room / mutations.OUTSIDE / "secret.safetensors")


def allowed(room: Path) -> tuple[Path, ...]:
    """What may be opened beside the hostile directory: what a recipe names, and caches."""
    places = ("~/.cache", "~/.triton")
    return (
        room / "model",
        room / "text.txt",
        *(Path(place).expanduser() for place in places),
        Path(tempfile.gettempdir()) / "compress-plan-",
    )


def hostile(kind: Kind, room: Path, chooser: random.Random) -> tuple[Path, str]:
    """A directory with one changed file, made in `room`, and which; `mend` makes it good again."""
    directory = room / f"hostile-{kind.directory}"
    if not directory.is_dir():
        shutil.copytree(room / kind.directory, directory)
    name = chooser.choice([name for name in kind.names if (directory / name).exists()])
    if chooser.random() < 0.03:
        mutations.in_directory(directory, name, chooser)
    else:
        (directory / name).write_bytes(kind.change((directory / name).read_bytes(), chooser))
    return directory, name


def mend(kind: Kind, room: Path, name: str) -> None:
    """Put the good file back."""
    file = room / f"hostile-{kind.directory}" / name
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    shutil.copyfile(room / kind.directory / name, file)
