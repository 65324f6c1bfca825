"""StarCoder 2: LayerNorm, biases everywhere, a feed-forward without a gate, and a sliding window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unspool.config import ModelConfig
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import IN_LAYER, WHOLE, Family
from unspool.models.layers import Architecture, Layer, LayerNorm, Mlp
from unspool.models.qwen2 import TINY_QWEN2
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

BIASES: dict[str, Any] = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)


class StarCoder2(Family):
    gguf_activation = "gelu_tanh"
    shapes = {
        "tiny-starcoder2": replace(
            TINY_QWEN2, architecture="starcoder2", activation="gelu_tanh", sliding_window=24, **BIASES
        )
    }
    whole_names = WHOLE | {"model.norm.bias": "output_norm.bias"}
    layer_names = IN_LAYER | {
        "input_layernorm.bias": "attn_norm.bias",
        "post_attention_layernorm.bias": "ffn_norm.bias",
        "mlp.c_fc.weight": "ffn_up.weight",
        "mlp.c_fc.bias": "ffn_up.bias",
        "mlp.c_proj.weight": "ffn_down.weight",
        "mlp.c_proj.bias": "ffn_down.bias",
    }

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, eps_key=gguf_keys.LAYER_NORM_EPS)
        return ModelConfig(**common | {"activation": "gelu_tanh"})

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        return gguf_keys.common_keys(config, eps_key=gguf_keys.LAYER_NORM_EPS)

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        if not fields.boolean("use_bias", True):
            fields.fail("use_bias", "a StarCoder 2 without biases is not supported")
        common = hf_keys.common(
            fields,
            name,
            keys={"rms_norm_eps": "norm_epsilon"},
            tied_embeddings=True,
            activation="gelu_pytorch_tanh",
        )
        return ModelConfig(**common | BIASES, sliding_window=hf_keys.window(fields))

    def architecture(self, config: ModelConfig) -> Architecture:
        return replace(super().architecture(config), norm=LayerNorm(config.norm_eps))

    def layer(self, config: ModelConfig, index: int) -> Layer:
        norm, ffn = LayerNorm(config.norm_eps), Mlp(config.intermediate_size, config.activation, bias=True)
        return Layer(self.attention(config, index), ffn, norm=norm, ffn_norm=norm)


FAMILY = StarCoder2()
