"""Presets, and fields that override them."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from compress.quantize import METHODS, PRESETS, check_fits, resolve_scheme
from runtime.errors import RequestError
from runtime.formats.presets import preset
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme

Config = METHODS["rtn"].config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_config_json(name: str) -> None:
    assert Scheme.from_config(PRESETS[name].to_config()) == PRESETS[name] == preset(name.lower())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Scheme(GridScheme(4, "int", True, "group", 128))),
        ({"scheme": "w4a16", "group_size": 32}, Scheme(GridScheme(4, "int", True, "group", 32))),
        ({"bits": 3, "group_size": -1}, Scheme(GridScheme(3, "int", True, "channel"))),
        ({"bits": 3, "group_size": "tensor", "symmetric": False}, Scheme(GridScheme(3, "int", False, "tensor"))),
        ({"scheme": "W8A8"}, PRESETS["W8A8-INT8"]),
        (
            {"scheme": "W8A8-INT8", "activation_mode": "static"},
            Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(8, "int", True, False, "tensor")),
        ),
        (
            {"scheme": "FP8", "activation_mode": "dynamic"},
            Scheme(GridScheme(8, "float", True, "tensor"), PRESETS["FP8_DYNAMIC"].activations),
        ),
        ({"bits": 4, "activations": "int8"}, PRESETS["W4A8"]),
        ({"bits": 4, "activations": "int4"}, PRESETS["W4A4"]),
        (
            {"scheme": "W4A4", "activation_mode": "static"},
            Scheme(GridScheme(4, "int", True, "group", 128), ActivationScheme(4, "int", True, False, "tensor")),
        ),
        ({"activations": "fp8"}, PRESETS["W4AFP8"]),
        ({"scheme": "llm.int8"}, Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme(outliers=6.0))),
        ({"scheme": "LLM.int8", "activation_mode": "dynamic"}, PRESETS["LLM.int8"]),
    ],
)
def test_fields_override_the_preset(fields: dict, expected: Scheme) -> None:
    assert resolve_scheme(Config(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "W4A61"}, "did you mean 'W4A16'"),
        ({"scheme": "FP8", "bits": 4}, "bits must be 8"),
        ({"scheme": "FP8", "group_size": 64}, "group_size must be 'channel' or 'tensor'"),
        ({"scheme": "FP8", "symmetric": False}, "no zero point"),
        ({"scheme": "FP8", "activations": "int8"}, "do not go with float weights"),
        ({"activation_mode": "static"}, "activations are not quantized"),
        ({"group_size": 0}, "group_size 0 is not possible"),
        ({"scheme": "Q6_K", "scales": "positive"}, "scales of both signs"),
        ({"scheme": "MXFP4", "activations": "int8"}, "fixed activations"),
        ({"scheme": {"representation": ["k_quant"]}}, "expected a name"),
        ({"scheme": {"representation": "k_quant", "kind": "Q4_K"}, "activations": "fp8"}, "is weight-only"),
    ],
)
def test_contradictions_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        resolve_scheme(Config(**fields))


def test_unknown_fields_and_wrong_bits_are_refused() -> None:
    with pytest.raises(ValidationError):
        Config(group=128)
    with pytest.raises(ValidationError):
        Config(bits=9)


def test_a_group_larger_than_the_row_is_refused() -> None:
    with pytest.raises(RequestError, match="q_proj: group_size 128"):
        check_fits(PRESETS["W4A16"], (8, 64), "q_proj")


def test_outliers_are_kept_with_dynamic_scales_only() -> None:
    with pytest.raises(
        RequestError, match="q_proj: activations that keep outliers are symmetric integers with one dynamic"
    ):
        check_fits(resolve_scheme(Config(scheme="LLM.int8", activation_mode="static")), (8, 64), "q_proj")


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_every_method_is_explained(name: str) -> None:
    method = METHODS[name]
    assert method.config.__doc__
    assert method.paper
    assert all(field.description for field in method.config.model_fields.values())
    assert method.config().method == name
