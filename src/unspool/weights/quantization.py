"""How a Hugging Face directory's weights were quantized: accepts what can be read, and names what cannot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unspool.weights.fields import Fields, read_json

# Ways to store 8-bit floats. compressed-tensors may contain other types, which are checked below.
EIGHT_BIT_FLOATS = ("fp8", "fbgemm_fp8", "compressed-tensors")
METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "hqq": "HQQ",
    "torchao": "torchao",
    "modelopt": "ModelOpt",
    "auto-round": "AutoRound",
    "quanto": "Quanto",
    "eetq": "EETQ",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "higgs": "HIGGS",
    "fp_quant": "FP-Quant",
    "bitnet": "BitNet",
    "mxfp4": "MXFP4",
    "quark": "Quark",
}


def check_quantization(fields: Fields) -> None:
    """Refuse a quantization whose tensors cannot be read, by its name."""
    value = fields.get("quantization_config")
    if value is None:
        value = fields.get("quantization")  # MLX's own
        _check_modelopt(fields)
    if value is None:
        return
    if not isinstance(value, dict):
        fields.fail("quantization_config", "an object was expected")
    method = value.get("quant_method")
    if method == "mxfp4" and fields.get("architectures") == ["GptOssForCausalLM"]:  # of its experts
        return
    if method not in EIGHT_BIT_FLOATS:
        _refuse(fields, _name_of(value))
    for kind in _kinds(value) if method == "compressed-tensors" else ():
        if kind != "float8":
            _refuse(fields, f"compressed-tensors with {kind} weights")


def _check_modelopt(fields: Fields) -> None:
    """Check ModelOpt's own file, which exists next to a config.json without a quantization."""
    file = fields.source.with_name("hf_quant_config.json")
    quantized = read_json(file).get("quantization") if file.is_file() else None
    algorithm = quantized.get("quant_algo") if isinstance(quantized, dict) else None
    if algorithm not in (None, "FP8"):
        _refuse(fields, f"ModelOpt's {str(algorithm)[:40]}")


def _name_of(value: dict[str, Any]) -> str:
    method = value.get("quant_method")
    if isinstance(method, str):
        return METHODS.get(method, repr(method[:40]))
    if "load_in_4bit" in value or "load_in_8bit" in value:  # in older files, which do not name their method
        return "bitsandbytes"
    return "MLX" if {"bits", "group_size"} <= value.keys() else "an unknown method"


def _kinds(value: dict[str, Any]) -> Iterator[str]:
    """The types of the weights in each group of layers: float8, int4, …"""
    groups = value.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}"[:40]


def _refuse(fields: Fields, what: str) -> None:
    fields.fail(
        "quantization_config",
        f"{what} cannot be read; of quantized directories those of 8-bit floats can, and gpt-oss' of MXFP4 "
        "(use the original weights, or a GGUF file)",
    )
