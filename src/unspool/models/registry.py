"""Which family runs which architecture. A family's module is imported when a model of that family is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.models import decoder
from unspool.models.decoder import Decoder
from unspool.models.family import Family
from unspool.models.layers import Architecture
from unspool.models.limits import check_config
from unspool.models.tensors import TensorReader
from unspool.ops import Ops
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

if TYPE_CHECKING:
    from unspool.models.draft_head import DraftHead

# Each family (a module here, and a ModelConfig's `architecture`), by the names in files.
GGUF = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gpt2": "gpt2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gpt-oss": "gpt_oss",
    "granite": "granite",
    "granitemoe": "granite_moe",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
    "gemma4": "gemma4",
    "gemma3n": "gemma3n",
    "phi3": "phi3",
    "mistral3": "mistral3",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "minimax-m2": "minimax_m2",
    "deepseek2": "deepseek_v3",
    "mistral4": "mistral4",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
    "qwen3next": "qwen3_next",
    "granitehybrid": "granite_hybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h_moe",
}
HUGGING_FACE = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "GPT2LMHeadModel": "gpt2",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "Olmo2ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
    "MinistralForCausalLM": "mistral",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma3nForCausalLM": "gemma3n",
    "Phi3ForCausalLM": "phi3",
    "Ministral3ForCausalLM": "mistral3",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Mistral4ForCausalLM": "mistral4",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",
    "NemotronHForCausalLM": "nemotron_h",
}
# Families whose GGUF files use another family's name.
GGUF_TOO = {"mistral": "llama", "mixtral": "llama", "deepseek_v2": "deepseek2", "glm4_moe_lite": "deepseek2"}
FAMILIES = tuple(dict.fromkeys([*GGUF.values(), *HUGGING_FACE.values()]))


def family_of(name: str) -> Family:
    """The family that a ModelConfig's `architecture` names."""
    if name not in FAMILIES:
        raise ModelError(f"architecture {name[:60]!r} is not supported; supported: {', '.join(FAMILIES)}")
    family: Family = import_module(f"unspool.models.{name}").FAMILY
    return family


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    name = Fields(file.path, file.metadata, "general.").string("architecture")
    if name not in GGUF:
        from unspool.models.refused import why_not

        known = ", ".join(GGUF)
        why = why_not(name)
        raise ModelError(f"{file.path}: architecture {name[:60]!r} is not supported{why}; supported: {known}")
    keys = Fields(file.path, file.metadata, f"{name}.")
    config = family_of(GGUF[name]).from_gguf(keys, file)
    if config.architecture == name:
        config = replace(config, architecture=GGUF[name])
    return check_config(file.path, config)


def config_from_json(path: Path, values: dict[str, Any]) -> ModelConfig:
    """`values` is the content of the config.json at `path`."""
    from unspool.models.refused import why_not
    from unspool.models.wrappers import TEXT_FAMILIES, text_fields
    from unspool.weights.quantization import check_quantization

    fields = Fields(path, values)
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        fields.fail("architectures", "one name was expected")
    check_quantization(fields)
    if names[0] in TEXT_FAMILIES:
        fields, name = text_fields(fields, names[0])
    elif names[0] in HUGGING_FACE:
        name = HUGGING_FACE[names[0]]
    else:
        known = ", ".join([*HUGGING_FACE, *TEXT_FAMILIES])
        fields.fail("architectures", f"{names[0][:60]!r} is not supported{why_not(names[0])}; supported: {known}")
    return check_config(path, family_of(name).from_hf(fields, name))


def gguf_name(architecture: str) -> str:
    """The architecture name of a family in GGUF files."""
    names = {family: name for name, family in reversed(GGUF.items())} | GGUF_TOO
    if architecture not in names:
        raise ModelError(f"architecture {architecture!r} has no GGUF keys; {', '.join(names)} have")
    return names[architecture]


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """The GGUF keys that `config_from_gguf` reads back as `config`."""
    name, family = gguf_name(config.architecture), family_of(config.architecture)
    if config.activation != family.gguf_activation:
        raise ModelError(f"GGUF stores {name} with the activation {family.gguf_activation}, not {config.activation}")
    keys = family.gguf_keys(config)
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in keys.items()}}


def tensors_of(config: ModelConfig) -> dict[str, Weight]:
    """The tensors that a GGUF file of this config has in addition to a model's weights."""
    found = family_of(config.architecture).gguf_tensors(config)
    return {name: Weight(name, "f32", (len(values),), memoryview(values.tobytes())) for name, values in found.items()}


def gguf_weights(file: GGUFFile, config: ModelConfig) -> dict[str, Weight]:
    """The tensors of a file that belong to the model."""
    family = family_of(config.architecture)
    return {name: weight for name, weight in file.tensors.items() if not family.ignores(name, config)}


def canonical_weights(tensors: Mapping[str, Weight], config: ModelConfig) -> dict[str, Weight]:
    """A Hugging Face directory's tensors with GGUF's names and conventions."""
    from unspool.models.wrappers import text_name

    family = family_of(config.architecture)
    weights: dict[str, Weight] = {}
    for stored, tensor in tensors.items():
        name = text_name(stored)
        for weight in () if name is None else family.canonical_weights(name, tensor, config):
            if weight.name in weights:
                raise ModelError(f"tensor {stored!r}: another tensor is {weight.name!r} too")
            weights[weight.name] = weight
    return weights


def gguf_draft_weights(file: GGUFFile, config: ModelConfig) -> dict[str, Weight]:
    """The tensors of a file's draft head; empty if it has none."""
    head = family_of(config.architecture).draft_head(config)
    if head is None:
        return {}
    return {name: weight for name, weight in file.tensors.items() if name.startswith(f"blk.{head.index}.")}


def canonical_draft_weights(tensors: Mapping[str, Weight], config: ModelConfig) -> dict[str, Weight]:
    """The draft head's tensors of a Hugging Face directory, with GGUF's names and conventions."""
    from unspool.models.wrappers import text_name

    family = family_of(config.architecture)
    names = ((name, tensor) for stored, tensor in tensors.items() if (name := text_name(stored)) is not None)
    return {each.name: each for name, tensor in names for each in family.draft_weights(name, tensor, config)}


def draft_head_of(config: ModelConfig) -> DraftHead | None:
    return family_of(config.architecture).draft_head(config)


@lru_cache(maxsize=4)  # a start asks for the same one several times
def architecture_of(config: ModelConfig) -> Architecture:
    return family_of(config.architecture).architecture(config)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, by its canonical name."""
    return decoder.tensor_shapes(config, architecture_of(config))


def build(
    config: ModelConfig, weights: Mapping[str, Weight], ops: Ops, progress: Callable[[float], None] | None = None
) -> Decoder:
    """Build a model that can be run; every one of `weights` must be used. `progress` is called with the share of the
    weights that was read."""
    return Decoder(config, architecture_of(config), TensorReader(ops, weights, progress))
