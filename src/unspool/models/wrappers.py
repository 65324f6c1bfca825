"""Text models inside models that also read images or sound: the family of the text part, and its tensors' names.

The parts for images and sound are not read; a message with an image is refused with an error that names it.
"""

from __future__ import annotations

import re
from typing import Any

from unspool.weights.fields import Fields

# Hugging Face's class of the whole model, and the family of its text part, or families by the text part's model_type.
TEXT_FAMILIES: dict[str, str | dict[str, str]] = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Mistral3ForConditionalGeneration": {"mistral": "mistral", "ministral3": "mistral3", "mistral4": "mistral4"},
    "Qwen2VLForConditionalGeneration": "qwen2",
    "Qwen2_5_VLForConditionalGeneration": "qwen2",
    "Qwen3VLForConditionalGeneration": "qwen3",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_moe",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
}
# Fields that files omit, if the whole model's default differs from that of the text part's family.
DEFAULTS: dict[str, dict[str, Any]] = {"Qwen3VLMoeForConditionalGeneration": {"norm_topk_prob": True}}
# Tensors that text does not need.
OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision_tower|vision_model|vision_embedder|multi_modal_projector|audio_tower|embed_vision"
    r"|embed_audio)\."
)


def text_fields(fields: Fields, name: str) -> tuple[Fields, str]:
    """The fields of a config.json for its text part, and the family; older files mix them with all other fields."""
    family, text = TEXT_FAMILIES[name], fields.object("text_config") or fields
    if isinstance(family, dict):
        kind = text.string("model_type")
        if kind not in family:
            text.fail("model_type", f"{kind[:60]!r} is not supported in {name}; supported: {', '.join(family)}")
        family = family[kind]
    values = {f"{text.prefix}{key}": value for key, value in DEFAULTS.get(name, {}).items()} | dict(text.values)
    if text is not fields and fields.get("tie_word_embeddings") is not None:
        values[f"{text.prefix}tie_word_embeddings"] = fields.get("tie_word_embeddings")
    return Fields(text.source, values, text.prefix), family


def text_name(name: str) -> str | None:
    """A tensor's name in a text-only model; None if it belongs to images or sound."""
    if OTHER_PARTS.match(name):
        return None
    for outer, inner in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name
