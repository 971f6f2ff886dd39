"""quantization_config: what we build, compressed-tensors reads; what llm-compressor writes, we read or refuse with a
reason.
"""

import copy

import pytest
from compressed_tensors.quantization import QuantizationConfig
from weight_cases import int_scheme

from runtime.errors import ArtifactError, CompressError
from runtime.formats.quantization_config import ModuleEntry, build, entry_from_dict, entry_to_dict, parse
from runtime.formats.scheme import ActivationScheme, GridScheme, Scheme

LINEAR = ["model.layers.0.q_proj", "model.layers.0.down_proj", "model.layers.1.q_proj", "lm_head"]
W4 = ModuleEntry(int_scheme(4, group=128), "pack-quantized")
W8A8 = ModuleEntry(Scheme(GridScheme(8, "int", True, "channel"), ActivationScheme()), "int-quantized")
STATIC = ModuleEntry(
    Scheme(GridScheme(8, "float", True, "tensor"), ActivationScheme(8, "float", True, False, "tensor")),
    "float-quantized",
)
SPARSE = ModuleEntry(int_scheme(4, False, 64, "2:4"), "sparse24")
BITMAP = ModuleEntry(Scheme(None, None, "unstructured"), "bitmap", 1234)


@pytest.mark.parametrize("entry", [W4, W8A8, STATIC, SPARSE, BITMAP], ids=lambda e: e.format)
def test_round_trips(entry):
    assert entry_from_dict(entry_to_dict(entry)) == entry
    modules = dict.fromkeys(LINEAR[:3], entry)
    assert parse(build(modules, LINEAR), LINEAR) == modules


def test_one_scheme_is_written_as_a_class_and_an_ignore_list():
    config = build(dict.fromkeys(LINEAR[:3], W4), LINEAR)
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert config["ignore"] == ["lm_head"]
    assert config["format"] == "pack-quantized"
    theirs = QuantizationConfig.model_validate(config)
    assert theirs.config_groups["group_0"].weights.group_size == 128


def test_mixed_schemes_are_exact_names():
    modules = {LINEAR[0]: W4, LINEAR[1]: W8A8, LINEAR[2]: W4}
    config = build(modules, LINEAR)
    assert config["format"] == "mixed-precision"
    assert [g["targets"] for g in config["config_groups"].values()] == [[LINEAR[0], LINEAR[2]], [LINEAR[1]]]
    QuantizationConfig.model_validate(config)
    assert parse(config, LINEAR) == modules


def test_zeros_alone_do_not_make_a_config_our_own():
    dense = ModuleEntry(int_scheme(4, group=128, sparsity="7:8"), "pack-quantized")
    config = build({LINEAR[0]: dense}, LINEAR)
    assert config["quant_method"] == "compressed-tensors"
    QuantizationConfig.model_validate(config)
    assert parse(config, LINEAR)[LINEAR[0]].scheme.sparsity is None


def test_own_formats_and_embeddings_make_it_our_own():
    config = build({LINEAR[0]: W4, LINEAR[1]: SPARSE, LINEAR[2]: BITMAP}, LINEAR)
    assert config["quant_method"] == "compress"
    assert config["value_counts"] == {LINEAR[2]: 1234}
    assert [g.get("sparsity") for g in config["config_groups"].values()] == [None, "2:4", "unstructured"]
    embedded = build({LINEAR[0]: W4, "model.embed_tokens": W4}, LINEAR)
    assert embedded["quant_method"] == "compress"
    assert set(parse(embedded, LINEAR)) == {LINEAR[0], "model.embed_tokens"}


def test_packed_zero_points_ask_transformers_to_unpack_while_loading():
    asymmetric = ModuleEntry(int_scheme(4, False, 128), "pack-quantized")
    assert build({LINEAR[0]: asymmetric}, LINEAR)["dequantize"] is True
    assert "dequantize" not in build({LINEAR[0]: W4}, LINEAR)
    # that path would forget the activations of another layer
    assert "dequantize" not in build({LINEAR[0]: asymmetric, LINEAR[1]: W8A8}, LINEAR)


def test_nothing_to_describe():
    with pytest.raises(CompressError):
        build({}, LINEAR)


LLM_COMPRESSOR = {
    "quant_method": "compressed-tensors",
    "version": "0.20.0",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic":
                False, "actorder": "weight", "observer": "mse", "observer_kwargs": {}, "block_structure": None,
            },
            "input_activations": None,
            "output_activations": None,
            "format": None,
        }
    },
}  # fmt: skip


def changed(path, value):
    config = copy.deepcopy(LLM_COMPRESSOR)
    place = config
    *parents, last = path.split("/")
    for part in parents:
        place = place[part]
    place[last] = value
    return config


def test_reads_llm_compressor():
    assert parse(LLM_COMPRESSOR, LINEAR) == dict.fromkeys(LINEAR[:3], W4)
    fp8 = changed("config_groups/group_0/weights", {"num_bits": 8, "type": "float", "strategy": "channel"})
    fp8["format"] = "naive-quantized"
    assert {e.format for e in parse(fp8, LINEAR).values()} == {"float-quantized"}
    bare = changed("config_groups/group_0/weights", {"num_bits": 4, "group_size": 128})
    assert parse(bare, LINEAR) == dict.fromkeys(LINEAR[:3], W4)
    channel = changed("config_groups/group_0/weights", {"num_bits": 4, "group_size": -1})
    assert parse(channel, LINEAR)[LINEAR[0]].scheme == int_scheme(4)


def test_targets_exact_before_pattern_before_class():
    config = copy.deepcopy(LLM_COMPRESSOR)
    group = config["config_groups"]["group_0"]
    weights = group["weights"]
    config["config_groups"] = {
        "all": group,
        "down": {**group, "targets": ["re:.*down_proj$"], "weights": {**weights, "num_bits": 8}},
        "one": {**group, "targets": ["model.layers.0.down_proj", LINEAR[2]], "weights": {**weights, "num_bits": 3}},
    }
    config["ignore"] = ["re:lm_.*"]
    bits = {name: entry.scheme.weights.bits for name, entry in parse(config, LINEAR).items()}
    assert bits == {LINEAR[0]: 4, LINEAR[1]: 3, LINEAR[2]: 3}


G = "config_groups/group_0"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("quant_method", "gptq", "quant_method 'gptq'"),
        ("quantization_status", "frozen", "quantization_status 'frozen'"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
        ("transform_config", {"config_groups": {"a": 1}}, "transform_config"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
        ("config_groups", {}, "no config_groups"),
        ("config_groups", [], "no config_groups"),
        ("format", "mxfp6-pack-quantized", "mxfp6-pack-quantized"),
        ("format", "pack-quantised", "pack-quantized"),
        ("ignore", "lm_head", "ignore is not a list"),
        (G, "W4A16", "group_0 is not an object"),
        (f"{G}/targets", None, "targets is not a list"),
        (f"{G}/targets", ["re:(("], "regular expression"),
        (f"{G}/weights", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 32},
        "groups of 16"), (f"{G}/weights", {"num_bits": 4, "type": "float", "strategy": "channel"}, "in groups"),
        (f"{G}/weights", {"num_bits": 4, "type": "float", "group_size": 32, "actorder": "group"}, "actorder"),
        (f"{G}/weights", {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": "torch.bfloat16"}, "scale_dtype"),
        (f"{G}/weights", {"num_bits": 4, "type": "float", "group_size": 32, "dynamic": True}, "dynamic"),
        (f"{G}/weights", {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, "tensor_group"),
        (f"{G}/weights", {"num_bits": 8, "type": "float", "strategy": "block"}, "block_structure is None"),
        (f"{G}/weights", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 0]}, "at least one row"),
        (f"{G}/weights", {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]}, "symmetric float8"),
        (f"{G}/weights", {"num_bits": 16, "strategy": "channel"}, "int16"),
        (f"{G}/weights", {"num_bits": "4", "strategy": "channel"}, "number type"),
        (f"{G}/weights", {"num_bits": 4, "strategy": "group"}, "group_size None"),
        (f"{G}/weights", {"num_bits": 4, "group_size": 128, "actorder": "group"}, "actorder"),
        (f"{G}/weights", 4, "is not an object"),
        (f"{G}/input_activations", {"num_bits": 8, "dynamic": "local", "strategy": "tensor"}, "'local'"),
        (f"{G}/input_activations", {"num_bits": 8, "strategy": "channel", "dynamic": True}, "'channel'"),
        (f"{G}/input_activations", {"num_bits": 4, "type": "float", "group_size": 64, "dynamic": True}, "groups of 32"),
        (f"{G}/input_activations", {"num_bits": 8, "type": "float", "group_size": 32, "dynamic": True, "scale_dtype": "int8"}, "int8"),
        (f"{G}/input_activations", {"num_bits": 8, "strategy": "token", "dynamic": False}, "not of a token"),
        (f"{G}/output_activations", {"num_bits": 8}, "output activations"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(path, value, words):
    with pytest.raises(ArtifactError, match=words):
        parse(changed(path, value), LINEAR)


def test_a_bitmap_needs_its_count():
    config = build({LINEAR[0]: BITMAP}, LINEAR)
    config["value_counts"] = {LINEAR[0]: -1}
    with pytest.raises(ArtifactError, match=LINEAR[0]):
        parse(config, LINEAR)
    with pytest.raises(ArtifactError, match="not an object"):
        parse(["no"], LINEAR)
