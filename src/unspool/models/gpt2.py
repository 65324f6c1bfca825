"""GPT-2: learned positions, LayerNorm, biases everywhere, a feed-forward without a gate.

Hugging Face stores its projections as [in, out], and q, k and v in one tensor, as GGUF does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import Family
from unspool.models.layers import Architecture, Attention, Layer, LayerNorm, Mlp
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight, transposed

HF_KEYS = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
PARTS = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
TINY_GPT2 = ModelConfig(
    architecture="gpt2",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=256,
    vocab_size=320,
    context_length=512,
    norm_eps=1e-5,
    tied_embeddings=True,
    activation="gelu_tanh",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
)


class Gpt2(Family):
    gguf_activation = "gelu_tanh"
    shapes = {"tiny-gpt2": TINY_GPT2}
    whole_names = {
        "wte.weight": "token_embd.weight",
        "wpe.weight": "position_embd.weight",
        "ln_f.weight": "output_norm.weight",
        "ln_f.bias": "output_norm.bias",
        "lm_head.weight": "output.weight",
    }
    layer_names = {
        f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in PARTS.items() for kind in ("weight", "bias")
    }
    layer_prefix = "h."
    optional_prefixes = ("transformer.",)
    unused_suffixes = (".attn.bias", ".attn.masked_bias")  # the causal mask

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, rotates=False, eps_key=gguf_keys.LAYER_NORM_EPS)
        return ModelConfig(**common | {"activation": "gelu_tanh"})

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        return gguf_keys.common_keys(config, eps_key=gguf_keys.LAYER_NORM_EPS)

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        if not fields.boolean("scale_attn_weights", True):
            fields.fail("scale_attn_weights", "scores that are not scaled are not supported")
        if fields.boolean("scale_attn_by_inverse_layer_idx", False):
            fields.fail("scale_attn_by_inverse_layer_idx", "scores that are scaled by layer are not supported")
        inner = 4 * fields.integer("n_embd", high=hf_keys.MAX_WIDTH)
        common = hf_keys.common(
            fields,
            name,
            keys=HF_KEYS,
            rotates=False,
            tied_embeddings=True,
            activation="gelu_new",
            intermediate_size=inner,
        )
        return ModelConfig(**common | dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True))

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        found = super().canonical_weights(name, weight, config)
        is_projection = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        return [transposed(each) for each in found] if is_projection else found

    def architecture(self, config: ModelConfig) -> Architecture:
        norm = LayerNorm(config.norm_eps)
        return replace(super().architecture(config), norm=norm, num_positions=config.context_length)

    def layer(self, config: ModelConfig, index: int) -> Layer:
        norm, inner = LayerNorm(config.norm_eps), config.intermediate_size
        ffn = Mlp(inner, config.activation, bias=config.mlp_bias)
        return Layer(self.attention(config, index), ffn, norm=norm, ffn_norm=norm)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), rotary=None, fused=True)


FAMILY = Gpt2()
