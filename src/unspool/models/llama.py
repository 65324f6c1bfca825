"""Llama and models with the same structure: SmolLM, Yi, TinyLlama, and GGUF files of Mistral."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig, RopeScaling
from unspool.models.family import Family
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

LLAMA_8B = ModelConfig(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128_256,
    context_length=131_072,
    norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_style="half",
    rope_dim=128,
    rope_scaling=RopeScaling("llama3", 8.0, original_context=8192),
)
LLAMA_1B = replace(
    LLAMA_8B,
    num_layers=16,
    hidden_size=2048,
    head_dim=64,
    rope_dim=64,
    intermediate_size=8192,
    rope_scaling=RopeScaling("llama3", 32.0, original_context=8192),
    tied_embeddings=True,
)
LLAMA_70B = replace(
    LLAMA_8B, num_layers=80, hidden_size=8192, num_heads=64, intermediate_size=28_672
)
# The second generation: a vocabulary of 32,000, and 4,096 tokens of context.
LLAMA2_70B = replace(LLAMA_70B, vocab_size=32_000, context_length=4096, rope_theta=10_000.0, rope_scaling=None)
LLAMA2_7B = replace(
    LLAMA2_70B, num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=32, intermediate_size=11_008
)
SMOLLM2_135M = ModelConfig(
    architecture="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49_152,
    context_length=8192,
    norm_eps=1e-5,
    rope_theta=100_000.0,
    rope_style="interleaved",
    rope_dim=64,
    tied_embeddings=True,
)
TINY = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=320,
    context_length=512,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_style="interleaved",
    rope_dim=16,
    tied_embeddings=True,
)


class Llama(Family):
    gguf_rope_style = "interleaved"
    shapes = {
        "llama-8b": LLAMA_8B,
        "llama-70b": LLAMA_70B,
        "llama2-7b": LLAMA2_7B,
        "llama2-70b": LLAMA2_70B,
        "llama-1b": LLAMA_1B,
        "smollm2-135m": SMOLLM2_135M,
        "tiny": TINY,
        "tiny-untied": replace(TINY, tied_embeddings=False),
        # every matrix's width is a multiple of 256, which k-quants need
        "tiny-wide": replace(TINY, hidden_size=256, head_dim=64, rope_dim=64, intermediate_size=512),
    }

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        if keys.integer("expert_count", 0, low=0):
            from unspool.models import mixtral  # it imports this module

            return mixtral.FAMILY.from_gguf(keys, file)
        return super().from_gguf(keys, file)


FAMILY = Llama()
