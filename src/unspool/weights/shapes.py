"""Models by their shape alone: the real ones that benchmarks time, and tiny ones, each a family's every peculiarity."""

from __future__ import annotations

import math
from dataclasses import replace

from unspool.config import ModelConfig, RopeScaling

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
MISTRAL_7B = replace(
    LLAMA_8B,
    architecture="mistral",
    vocab_size=32_000,
    context_length=32_768,
    rope_theta=10_000.0,
    rope_scaling=None,
    sliding_window=4096,
)
QWEN2_5_0_5B = ModelConfig(
    architecture="qwen2",
    num_layers=24,
    hidden_size=896,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=4864,
    vocab_size=151_936,
    context_length=32_768,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_style="half",
    rope_dim=64,
    tied_embeddings=True,
)
QWEN3_0_6B = replace(
    QWEN2_5_0_5B,
    architecture="qwen3",
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope_dim=128,
    intermediate_size=3072,
    context_length=40_960,
)
GEMMA3_270M = ModelConfig(
    architecture="gemma3",
    num_layers=18,
    hidden_size=640,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    intermediate_size=2048,
    vocab_size=262_144,
    context_length=32_768,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_style="half",
    rope_dim=256,
    tied_embeddings=True,
    activation="gelu_tanh",
    sliding_window=512,
    sliding_pattern=6,
    rope_theta_local=10_000.0,
    embedding_scale=math.sqrt(640),
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
TINY_QWEN2 = replace(TINY, architecture="qwen2", rope_style="half", norm_eps=1e-6)

SHAPES: dict[str, ModelConfig] = {
    "llama-8b": LLAMA_8B,
    "llama-1b": LLAMA_1B,
    "smollm2-135m": SMOLLM2_135M,
    "mistral-7b": MISTRAL_7B,
    "qwen2.5-0.5b": QWEN2_5_0_5B,
    "qwen3-0.6b": QWEN3_0_6B,
    "gemma3-270m": GEMMA3_270M,
    "tiny": TINY,
    "tiny-untied": replace(TINY, tied_embeddings=False),
    # every matrix a multiple of 256 wide, as the k-quants need
    "tiny-wide": replace(TINY, hidden_size=256, head_dim=64, rope_dim=64, intermediate_size=512),
    "tiny-mistral": replace(TINY, architecture="mistral", rope_style="half", sliding_window=24, tied_embeddings=False),
    "tiny-qwen2": TINY_QWEN2,
    # heads wider than the model divided by their number, as Qwen3's are
    "tiny-qwen3": replace(TINY_QWEN2, architecture="qwen3", head_dim=32, rope_dim=32),
    "tiny-gemma3": replace(
        TINY_QWEN2,
        architecture="gemma3",
        num_layers=4,
        num_kv_heads=1,
        activation="gelu_tanh",
        sliding_window=24,
        sliding_pattern=3,
        rope_theta=1_000_000.0,
        rope_theta_local=10_000.0,
        embedding_scale=math.sqrt(64),
    ),
}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, by its canonical name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_width, hidden),
        "attn_k.weight": (kv_width, hidden),
        "attn_v.weight": (kv_width, hidden),
        "attn_output.weight": (hidden, q_width),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if config.architecture == "qwen2":
        layer |= {"attn_q.bias": (q_width,), "attn_k.bias": (kv_width,), "attn_v.bias": (kv_width,)}
    if config.architecture in ("qwen3", "gemma3"):
        layer |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    if config.architecture == "gemma3":
        layer |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    shapes["output_norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab_size, hidden)
    return shapes
