"""Architectures that are known but not supported, by the names in files, with the reason."""

from __future__ import annotations

INDEXER = "its attention is sparse: an indexer chooses the keys of each query"
HYPER = "it has hyper-connections and sparse attention"
ENCODER = "it is an encoder, which generates no text"
TWO_PARTS = "it is an encoder with a decoder, which reads its prompt in both directions"
CHUNKED = "its attention sees chunks of the context"
RECURRENT = "its recurrent layers are not supported"
ONE_BIT = "its weights have three values, for which there are no kernels"

REASONS: dict[str, str] = {
    "DeepseekV32ForCausalLM": INDEXER,
    "DeepseekV4ForCausalLM": HYPER,
    "GlmMoeDsaForCausalLM": INDEXER,
    "MiniMaxM3ForConditionalGeneration": INDEXER,
    "Llama4ForCausalLM": CHUNKED,
    "Llama4ForConditionalGeneration": CHUNKED,
    "BitNetForCausalLM": ONE_BIT,
    "MambaForCausalLM": RECURRENT,
    "Mamba2ForCausalLM": RECURRENT,
    "RwkvForCausalLM": RECURRENT,
    "BertModel": ENCODER,
    "BertForMaskedLM": ENCODER,
    "NomicBertModel": ENCODER,
    "XLMRobertaModel": ENCODER,
    "T5ForConditionalGeneration": TWO_PARTS,
    "T5GemmaForConditionalGeneration": TWO_PARTS,
    "BartForConditionalGeneration": TWO_PARTS,
    "MllamaForConditionalGeneration": "its layers that read images stand between those of text",
    "deepseek32": INDEXER,
    "deepseek4": HYPER,
    "glm-dsa": INDEXER,
    "minimax-m3": INDEXER,
    "llama4": CHUNKED,
    "bitnet": ONE_BIT,
    "mamba": RECURRENT,
    "mamba2": RECURRENT,
    "rwkv6": RECURRENT,
    "rwkv7": RECURRENT,
    "bert": ENCODER,
    "nomic-bert": ENCODER,
    "gemma-embedding": ENCODER,
    "t5": TWO_PARTS,
    "clip": "it is the part of a model that reads images; open the model's own file",
}


def why_not(name: str) -> str:
    """The part of an error message with the reason, or an empty text."""
    return f": {REASONS[name]}" if name in REASONS else ""
