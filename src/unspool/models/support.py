"""The supported families, with the names used in files and the names that users know their models by."""

from __future__ import annotations

from unspool.models.registry import FAMILIES, GGUF, GGUF_TOO, HUGGING_FACE
from unspool.models.wrappers import TEXT_FAMILIES
from unspool.records import record

MODELS = {
    "llama": "Llama 2 and 3, SmolLM, TinyLlama, Yi; with biases of attention or feed-forward, too",
    "qwen2": "Qwen 2 and 2.5; text of Qwen 2 VL and 2.5 VL",
    "qwen3": "Qwen 3, dense; text of Qwen 3 VL",
    "gemma3": "Gemma 3, text; any pattern of sliding layers",
    "gpt2": "GPT-2",
    "qwen2_moe": "Qwen 1.5 and 2 with experts",
    "qwen3_moe": "Qwen 3 with experts, Qwen 3 Coder; text of Qwen 3 VL with experts",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gpt_oss": "gpt-oss, of floats or MXFP4",
    "granite": "Granite 3",
    "granite_moe": "Granite 3 with experts, with a shared one, too",
    "olmo2": "OLMo 2",
    "olmoe": "OLMoE",
    "smollm3": "SmolLM 3",
    "starcoder2": "StarCoder 2",
    "gemma4": "Gemma 4, text: E2B, E4B, 26B-A4B, 31B",
    "gemma3n": "Gemma 3n, text: E2B, E4B",
    "phi3": "Phi 3, 3.5 and 4, with longrope",
    "mistral3": "Mistral Small 3, Ministral 3; text of Mistral 3",
    "glm4": "GLM 4",
    "glm4_moe": "GLM 4.5 to 4.7 with experts",
    "minimax_m2": "MiniMax M2",
    "deepseek_v3": "DeepSeek V3, R1; Kimi K2",
    "mistral4": "Mistral 4, text",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 with experts",
    "qwen3_5": "Qwen 3.5 to 3.8, text",
    "qwen3_5_moe": "Qwen 3.5 to 3.8 with experts, text",
    "qwen3_next": "Qwen 3 Next",
    "granite_hybrid": "Granite 4, dense and with experts",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2",
    "nemotron_h_moe": "Nemotron 3",
    "mistral": "Mistral 7B, Ministral 8B; any pattern of sliding layers",
    "mixtral": "Mixtral",
    "deepseek_v2": "DeepSeek V2, V2 Lite",
    "glm4_moe_lite": "GLM 4.7 Flash",
}
# Families whose Hugging Face files use another family's class.
CLASSES_TOO = {"nemotron_h_moe": "NemotronHForCausalLM"}


@record(frozen=True)
class Support:
    """One family."""

    family: str
    classes: tuple[str, ...]  # Hugging Face's names, including those of models that also read images or sound
    gguf: tuple[str, ...]
    models: str


def supported() -> list[Support]:
    """Every family, by name."""
    return [Support(family, _classes(family), _gguf(family), MODELS[family]) for family in sorted(FAMILIES)]


def _classes(family: str) -> tuple[str, ...]:
    own = [name for name, each in HUGGING_FACE.items() if each == family]
    whole = [
        name for name, each in TEXT_FAMILIES.items() if family in ([each] if isinstance(each, str) else each.values())
    ]
    return (*own, *whole) or (CLASSES_TOO[family],)


def _gguf(family: str) -> tuple[str, ...]:
    own = [name for name, each in GGUF.items() if each == family]
    return tuple(own or [GGUF_TOO[family]])
