"""The `quantization_config` of config.json: which module is stored in which format, in the vocabulary of
compressed-tensors.

What compressed-tensors can express is written as its own configuration, so other engines read it. As soon as one module
needs a format of ours, or transforms or rounds its inputs in a way of ours, the method is called `compress` (see `runtime.layers.hf`): the
same layout, plus `sparsity` in each group and `value_counts` for formats whose size depends on the data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime import formats
from runtime.config.messages import did_you_mean
from runtime.errors import ArtifactError, CompressError, RequestError
from runtime.formats.activation_scheme import ActivationScheme
from runtime.formats.scheme import Scheme, own_kind

OWN_METHOD = "compress"
SHARED_METHOD = "compressed-tensors"
MIXED = "mixed-precision"


@dataclass(frozen=True)
class ModuleEntry:
    """How one module is stored: number grid, format, and the number of stored values where the format needs it."""

    scheme: Scheme
    format: str
    count: int | None = None

    @property
    def own(self) -> bool:
        """Whether only this runtime computes such a module: compressed-tensors has no words for its format or for its inputs."""
        scheme, activations = self.scheme, self.scheme.activations
        return (
            formats.get(self.format).own
            or scheme.transform is not None
            or (activations is not None and activations.own)
        )


def entry_to_dict(entry: ModuleEntry) -> dict[str, Any]:
    """JSON form of one entry."""
    return {"scheme": entry.scheme.to_config(), "format": entry.format, "count": entry.count}


def entry_from_dict(value: Mapping[str, Any]) -> ModuleEntry:
    """Inverse of `entry_to_dict`."""
    return ModuleEntry(Scheme.from_config(value["scheme"]), value["format"], value.get("count"))


def build(
    modules: Mapping[str, ModuleEntry],
    all_linear_names: Iterable[str],
    foreign: Collection[str] = (),
    also: Mapping[str, str] | None = None,
    by_name: bool = False,
) -> dict[str, Any]:
    """The configuration that describes `modules`; linear layers that are not among them are listed under `ignore`.

    Args:
        foreign: modules that transformers with compressed-tensors alone would not find or not replace; with one of them the configuration
            is ours.
        also: {linear layer: another name of it}, under which it is ignored too where it is not among `modules`.
        by_name: modules are never meant as "Linear": the model may have linear layers that `all_linear_names` does not know.
    """
    if not modules:
        raise CompressError("a quantization_config needs at least one compressed module")
    linear = list(all_linear_names)
    # transformers cannot load an embedding that compressed-tensors has packed: an embedding makes the config ours.
    shared = set(modules) <= set(linear) - set(foreign) and not any(entry.own for entry in modules.values())
    groups: dict[tuple[Scheme, str], list[str]] = {}
    for name, entry in modules.items():
        # compressed-tensors has no word for sparsity: there the zeros are just values.
        scheme = replace(entry.scheme, sparsity=None) if shared else entry.scheme
        groups.setdefault((scheme, entry.format), []).append(name)
    config: dict[str, Any] = {
        "quant_method": SHARED_METHOD if shared else OWN_METHOD,
        "format": modules[next(iter(modules))].format if len({e.format for e in modules.values()}) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [
            own for name in linear if name not in modules for own in dict.fromkeys((name, (also or {}).get(name, name)))
        ],
    }
    for index, ((scheme, name), members) in enumerate(groups.items()):
        targets = ["Linear"] if shared and len(groups) == 1 and not by_name else members
        config["config_groups"][f"group_{index}"] = {"targets": targets, **scheme.to_config(), "format": name}
    if shared and needs_dense_loading(modules.values()):
        config["dequantize"] = True
    if not shared:
        config["value_counts"] = {n: e.count for n, e in modules.items() if e.count is not None}
    return config


def needs_dense_loading(entries: Collection[ModuleEntry]) -> bool:
    """True where from_pretrained must unpack while it loads, because compressed-tensors (0.20) sizes packed zero
    points wrongly.

    It prepares a module for packed weights but for unpacked zero points, and then refuses the checkpoint
    (llm-compressor issue 1618). transformers reads `dequantize` from the config; other engines pass over it. With
    quantized activations that path would drop their rounding, so there it is not used.
    """
    schemes = [entry.scheme for entry in entries if entry.format == "pack-quantized"]
    packed = any(s.grid is not None and not s.grid.symmetric and s.grid.strategy != "tensor" for s in schemes)
    return packed and all(entry.scheme.activations is None for entry in entries)


def parse(
    config: Mapping[str, Any],
    linear_names: Iterable[str],
    embedding_names: Iterable[str] = (),
    place: Callable[[str], str] = str,
) -> dict[str, ModuleEntry]:
    """{module: entry} for a model with these linear (and embedding) modules, in their order.

    Args:
        place: the model's name of a module that goes by another in the configuration (`runtime.modeling.tensor_names`).

    Reads our configurations and those llm-compressor writes (class, exact-name and `re:` targets, presets spelled out).

    Raises:
        ArtifactError: the configuration is malformed or asks for something this runtime does not do.
    """
    if not isinstance(config, Mapping):
        raise ArtifactError("quantization_config in config.json is not an object")
    _check_top(config)
    classes = {"Linear": list(linear_names), "Embedding": list(embedding_names)}
    names = list(dict.fromkeys([*classes["Embedding"], *classes["Linear"]]))
    counts = {place(name): count for name, count in (config.get("value_counts") or {}).items()}
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ArtifactError("quantization_config has no config_groups")
    # An exact name wins over a pattern, a pattern over a class; within one kind the first group wins.
    ranked: dict[str, tuple[int, ModuleEntry]] = {}
    for key, group in groups.items():
        entry = _entry(key, group, config.get("format"))
        for target in _strings(group.get("targets"), f"config_groups.{key}.targets"):
            rank, matched = _match(target, names, classes, key)
            for name in map(place, matched) if rank == 0 else matched:
                if name not in ranked or rank < ranked[name][0]:
                    ranked[name] = (rank, replace(entry, count=counts.get(name)))
    for pattern in _strings(config.get("ignore") or [], "ignore"):
        for name in _match(pattern, names, classes, "ignore")[1]:
            ranked.pop(place(name), None)
    for name, (_, entry) in ranked.items():
        if formats.get(entry.format).counted and not (isinstance(entry.count, int) and entry.count >= 0):
            raise ArtifactError(f"quantization_config.value_counts has no count for {name}, stored as {entry.format}")
    order = {name: i for i, name in enumerate(names)}
    return {name: ranked[name][1] for name in sorted(ranked, key=lambda n: order.get(n, -1))}


def static_prefix(config: Any) -> tuple[int, ...] | None:
    """Token ids behind which a configuration's static input scales were calibrated, `()`: behind none; None: it has no such scales.

    Raises:
        ArtifactError: a group is malformed.
    """
    if not isinstance(config, Mapping) or config.get("quant_method") not in (OWN_METHOD, SHARED_METHOD):
        return None
    groups = config.get("config_groups")
    for key, group in groups.items() if isinstance(groups, Mapping) else ():
        activations = _entry(key, group, config.get("format")).scheme.activations
        if activations is not None and activations.dynamic is False:
            return activations.prefix
    return None


def refuse_prefix(config: Any, text: str) -> None:
    """RequestError, `text` with the reason, where static input scales of a configuration were calibrated behind prefix tokens.

    For whoever puts nothing before texts.
    """
    if static_prefix(config):
        raise RequestError(f"{text}: its static activations need its prefix tokens")


def _check_top(config: Mapping[str, Any]) -> None:
    method = config.get("quant_method")
    if method not in (OWN_METHOD, SHARED_METHOD):
        raise ArtifactError(
            f"quantization_config has quant_method {method!r}; this runtime reads {OWN_METHOD!r} and {SHARED_METHOD!r}"
        )
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise ArtifactError(f"quantization_config has quantization_status {status!r}; only 'compressed' weights load")
    for key in ("kv_cache_scheme", "transform_config", "sparsity_config"):
        value = config.get(key)
        if value and not (key == "sparsity_config" and value.get("format") in (None, "dense")):
            raise ArtifactError(f"quantization_config.{key} is set, and this runtime does not run it")


def _entry(key: str, group: Any, default_format: Any) -> ModuleEntry:
    where = f"quantization_config.config_groups.{key}"
    if not isinstance(group, Mapping):
        raise ArtifactError(f"{where} is not an object")
    if group.get("output_activations"):
        raise ArtifactError(f"{where} quantizes output activations, which this runtime does not do")
    cleaned = dict(group)
    for part in ("weights", "input_activations"):
        given = group.get(part)
        if given and not (part == "weights" and isinstance(given, Mapping) and "representation" in given):
            cleaned[part] = _arguments(given, f"{where}.{part}", part == "weights")
    try:
        scheme = Scheme.from_config(cleaned)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{where}: {error}") from None
    name = group.get("format") or default_format
    if name == "naive-quantized":  # what compressed-tensors calls the same layout without activations
        name = "int-quantized" if scheme.grid and scheme.grid.type == "int" else "float-quantized"
    if name not in formats.names():
        hint = did_you_mean(name, formats.names())
        raise ArtifactError(f"{where} has format {name!r}, this runtime reads {', '.join(formats.names())}{hint}")
    return ModuleEntry(scheme, name)


def _arguments(given: Any, where: str, weights: bool) -> dict[str, Any]:
    """One `QuantizationArgs` object with what compressed-tensors lets out filled in, or ArtifactError."""
    if not isinstance(given, Mapping):
        raise ArtifactError(f"{where} is not an object")
    args = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "strategy": None, "dynamic": False}
    args |= {name: value for name, value in given.items() if value is not None}
    size = args["group_size"]
    if args["strategy"] is None:
        args["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    groups = ("group", "tensor_group")
    allowed = ("tensor", "channel", *groups, "block") if weights else ("tensor", "token", *groups)
    if args["strategy"] not in allowed:
        raise ArtifactError(f"{where} has strategy {args['strategy']!r}, this runtime runs {', '.join(allowed)}")
    if args["type"] not in ("int", "float") or not isinstance(args["num_bits"], int):
        raise ArtifactError(
            f"{where} has no number type this runtime knows: {args['type']!r}, {args['num_bits']!r} bits"
        )
    if args.get("actorder") in ("group", "dynamic", True):
        raise ArtifactError(
            f"{where} has actorder {args['actorder']!r} (permuted groups); write it with 'weight' instead"
        )
    if args["dynamic"] not in ((False,) if weights else (True, False, "local")):
        raise ArtifactError(f"{where} has dynamic {args['dynamic']!r}, which this runtime does not run")
    try:
        kind = own_kind(args) if weights else None
        activations = None if weights else ActivationScheme.from_arguments(args)
        reason = None if kind is None else kind.why_not((1, size if isinstance(size, int) and size else 1))
        if activations is not None:
            reason = activations.why_not((activations.group_size or 1) + activations.int8_tail)
    except ValueError as error:
        reason = str(error)
    if reason is not None:
        raise ArtifactError(f"{where}: {reason}")
    if kind is not None or activations is not None:
        return args
    if (args["type"] == "float" and args["num_bits"] != 8) or not 2 <= args["num_bits"] <= 8:
        raise ArtifactError(
            f"{where} is {args['type']}{args['num_bits']}; this runtime runs int2 to int8, float8 e4m3, and float4 in blocks"
        )
    if args["strategy"] == "tensor_group":
        raise ArtifactError(f"{where} has strategy 'tensor_group', which this runtime runs for float4 only")
    if args["strategy"] == "group" and not (isinstance(size, int) and size > 0):
        raise ArtifactError(f"{where} has strategy 'group' and group_size {size!r}, expected a positive integer")
    return args


def _match(target: str, names: list[str], classes: Mapping[str, list[str]], key: str) -> tuple[int, list[str]]:
    """Rank (0 exact, 1 pattern, 2 class) and the modules that a target or ignore string means."""
    if target.startswith("re:"):
        try:
            pattern = re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise ArtifactError(
                f"quantization_config: {target!r} in {key} is no regular expression: {error}"
            ) from error
        return 1, [name for name in names if pattern.match(name)]
    if target in classes:
        return 2, classes[target]
    # A name that is not listed is left for `install`, which knows all modules. Ignored names need not exist.
    return 0, [target]


def _strings(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ArtifactError(f"quantization_config.{where} is not a list of strings")
    return value
