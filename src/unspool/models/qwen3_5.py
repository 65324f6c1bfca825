"""Qwen 3.5 to 3.8: most layers are gated delta nets, the others are attention whose result is gated.

Positions of images (mRoPE's sections) are not read; text has ordinary positions. Files have an additional layer for
multi-token prediction (MTP), which can draft; a model runs without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from unspool.config import ModelConfig
from unspool.errors import ModelError
from unspool.lazy import np
from unspool.models import draft_head, gguf_keys, hf_keys, hybrid
from unspool.models.draft_head import DraftHead
from unspool.models.expert_config import ExpertConfig
from unspool.models.family import IN_LAYER, Family
from unspool.models.glm4_moe import beyond_layers
from unspool.models.layers import Attention, Layer, RmsNorm
from unspool.models.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from unspool.models.qwen2 import TINY_QWEN2
from unspool.models.recurrent import DeltaNet
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight, encode_weight

ROTATED = 0.25  # of each head's channels
INTERVAL = 4  # one of this many layers is attention
FFN_NORM = "post_attention_norm"  # GGUF's name for the norm before the feed-forward
RECURRENT_LAYERS = "attention.recurrent_layers"
MAX_TAPS = 64
# DeepSeek's names of the draft head's additional tensors, by the names in Hugging Face's files of Qwen.
HEAD_NAMES = {
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "shared_head.norm.weight",
}
HEAD_LAYER = "mtp.layers.0."


@record(frozen=True)
class DeltaConfig(ExpertConfig):
    """A model of gated delta nets and attention; `num_experts` is 0 if it has no experts."""

    delta_heads: int = 0  # heads of values
    delta_key_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    taps: int = 4  # of the convolutions
    tiled: bool = False  # see DeltaNet: GGUF stores value heads this way, Hugging Face does not
    attention_layers: tuple[bool, ...] = ()
    extra_layers: int = 0  # further layers in the files, which are not run


TINY_QWEN3_5 = DeltaConfig(
    **vars(replace(TINY_QWEN2, architecture="qwen3_5", num_layers=3, head_dim=32, rope_dim=8, qkv_bias=False)),
    delta_heads=4,
    delta_key_heads=2,
    delta_key_dim=32,
    delta_value_dim=32,
    tiled=True,
    attention_layers=(False, True, False),
)
QWEN3_5_0_8B = replace(
    TINY_QWEN3_5, num_layers=24, hidden_size=1024, num_heads=8, num_kv_heads=2, head_dim=256, rope_dim=64,
    intermediate_size=3584, vocab_size=248_320, context_length=262_144, rope_theta=1e7, tied_embeddings=True,
    delta_heads=16, delta_key_heads=16, delta_key_dim=128, delta_value_dim=128, tiled=False,
    attention_layers=tuple((layer + 1) % INTERVAL == 0 for layer in range(24)),
)  # fmt: skip


class Qwen35(Family):
    shapes = {"qwen3.5-0.8b": QWEN3_5_0_8B, "tiny-qwen3.5": TINY_QWEN3_5}
    gguf_tiled: ClassVar[bool] = True
    joint_gates: ClassVar[bool] = False  # see DeltaNet
    layer_names = IN_LAYER | draft_head.NAMES | {
        "post_attention_layernorm.weight": f"{FFN_NORM}.weight",
        "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
        "linear_attn.in_proj_z.weight": "attn_gate.weight",
        "linear_attn.in_proj_b.weight": "ssm_beta.weight",
        "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
        "linear_attn.conv1d.weight": "ssm_conv1d.weight",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "linear_attn.norm.weight": "ssm_norm.weight",
        "linear_attn.out_proj.weight": "ssm_out.weight",
    }

    # Reading -----------------------------------------------------------------------------------------------------
    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        common = hf_keys.common(fields, name, head_dim=256, rotated=ROTATED, intermediate_size=self.no_dense_width)
        layers = common["num_layers"]
        delta: dict[str, Any] = {
            "delta_heads": fields.integer("linear_num_value_heads", 32, high=MAX_HEADS),
            "delta_key_heads": fields.integer("linear_num_key_heads", 16, high=MAX_HEADS),
            "delta_key_dim": fields.integer("linear_key_head_dim", 128, high=MAX_HEAD_DIM),
            "delta_value_dim": fields.integer("linear_value_head_dim", 128, high=MAX_HEAD_DIM),
        }
        return self._checked(
            fields,
            "linear_num_value_heads",
            DeltaConfig(
                **common,
                **delta,
                **self.experts_from_hf(fields, layers),
                taps=fields.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_TAPS),
                attention_layers=_attention_from_hf(fields, layers),
            ),
        )

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        if self.no_dense_width is not None and keys.get("feed_forward_length") is None:
            keys = hybrid.with_values(keys, {"feed_forward_length": self.no_dense_width})
        common = gguf_keys.common(keys, file, experts=self.no_dense_width is not None)
        extra = keys.integer("nextn_predict_layers", 0, low=0, high=common["num_layers"] - 1)
        heads, key_heads = (
            keys.integer(f"ssm.{key}", high=MAX_HEADS) for key in ("time_step_rank", "group_count")
        )
        inner = keys.integer("ssm.inner_size", high=MAX_HEADS * MAX_HEAD_DIM)
        if inner % heads:
            keys.fail("ssm.inner_size", f"{inner} channels cannot be shared among {heads} heads evenly")
        return self._checked(
            keys,
            "ssm.time_step_rank",
            DeltaConfig(
                **common
                | {
                    "num_layers": common["num_layers"] - extra,
                    "qkv_bias": any(name.endswith("attn_q.bias") for name in file.tensors),
                    "output_bias": any(name.endswith("attn_output.bias") for name in file.tensors),
                },
                **self.experts_from_gguf(keys),
                delta_heads=heads,
                delta_key_heads=key_heads,
                delta_key_dim=keys.integer("ssm.state_size", high=MAX_HEAD_DIM),
                delta_value_dim=inner // heads,
                taps=keys.integer("ssm.conv_kernel", low=2, high=MAX_TAPS),
                tiled=self.gguf_tiled and heads != key_heads,
                attention_layers=_attention_from_gguf(keys, common["num_layers"])[: common["num_layers"] - extra],
                extra_layers=extra,
            ),
        )

    no_dense_width: ClassVar[int | None] = None  # of a dense feed-forward, in models that have none

    def experts_from_hf(self, fields: Fields, num_layers: int) -> dict[str, Any]:
        """The fields that ExpertConfig adds."""
        return {}

    def experts_from_gguf(self, keys: Fields) -> dict[str, Any]:
        return {}

    def _checked(self, fields: Fields, key: str, config: DeltaConfig) -> DeltaConfig:
        if config.delta_heads % config.delta_key_heads:
            fields.fail(key, f"{config.delta_heads} heads of values cannot share {config.delta_key_heads} of keys")
        return config

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, DeltaConfig)
        if config.delta_heads != config.delta_key_heads and config.tiled != self.gguf_tiled:
            order = "the number of key heads apart" if self.gguf_tiled else "beside each other"
            raise ModelError(f"GGUF stores {config.architecture} with value heads of one key head {order}")
        extra, pairs = config.extra_layers, config.rope_dim // 2
        return super().gguf_keys(config) | _gguf_pattern(config) | {
            "block_count": config.num_layers + extra,
            "nextn_predict_layers": extra,
            # Pairs rotated by time, height and width, one after the other; for text, all three are the position.
            "rope.dimension_sections": [*(-(-(pairs - axis) // 3) for axis in range(3)), 0],
            "ssm.conv_kernel": config.taps,
            "ssm.state_size": config.delta_key_dim,
            "ssm.group_count": config.delta_key_heads,
            "ssm.time_step_rank": config.delta_heads,
            "ssm.inner_size": config.delta_heads * config.delta_value_dim,
        }

    def ignores(self, name: str, config: ModelConfig) -> bool:
        assert isinstance(config, DeltaConfig)
        return super().ignores(name, config) or beyond_layers(name, "blk.", config.num_layers, config.extra_layers)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        if name.startswith(("mtp.", "model.mtp.")):
            return []
        return [_by_gguf(each) for each in super().canonical_weights(name, weight, config)]

    # The draft head
    # ------------------------------------------------------------------------------------------------------
    def draft_head(self, config: ModelConfig) -> DraftHead:
        index = config.num_layers
        layer = replace(super().layer(config, index), ffn_norm_name=FFN_NORM)  # this layer is attention
        return DraftHead(layer, index, RmsNorm(config.norm_eps))

    def draft_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        name = name.removeprefix("model.") if name.startswith("model.mtp.") else name
        in_layer = HEAD_NAMES.get(name)
        if name.startswith(HEAD_LAYER):
            in_layer = name.removeprefix(HEAD_LAYER)
        if in_layer is None:
            return []
        return self.canonical_weights(f"{self.layer_prefix}{config.num_layers}.{in_layer}", weight, config)

    # Layers ------------------------------------------------------------------------------------------------------
    def layer(self, config: ModelConfig, index: int) -> Layer:
        assert isinstance(config, DeltaConfig)
        layer = replace(super().layer(config, index), ffn_norm_name=FFN_NORM)
        return layer if config.attention_layers[index] else replace(layer, mixer=self._delta_net(config))

    def _delta_net(self, config: DeltaConfig) -> DeltaNet:
        return DeltaNet(
            num_heads=config.delta_heads,
            num_key_heads=config.delta_key_heads,
            key_dim=config.delta_key_dim,
            value_dim=config.delta_value_dim,
            taps=config.taps,
            norm_eps=config.norm_eps,
            tiled=config.tiled,
            joint_gates=self.joint_gates,
        )

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return replace(super().attention(config, index), qk_norm=RmsNorm(config.norm_eps), gate=True)


def _attention_from_hf(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    if fields.get("layer_types") is None:
        interval = fields.integer("full_attention_interval", INTERVAL, high=MAX_LAYERS)
        return tuple((layer + 1) % interval == 0 for layer in range(num_layers))
    kinds = hybrid.kinds_of(fields, "layer_types", num_layers, ("linear_attention", "full_attention"))
    return tuple(kind == "full_attention" for kind in kinds)


def _attention_from_gguf(keys: Fields, num_layers: int) -> tuple[bool, ...]:
    listed = keys.get(RECURRENT_LAYERS)
    if listed is None:
        interval = keys.integer("full_attention_interval", INTERVAL, high=MAX_LAYERS)
        return tuple((layer + 1) % interval == 0 for layer in range(num_layers))
    if not isinstance(listed, list) or len(listed) != num_layers or any(type(each) is not bool for each in listed):
        keys.fail(RECURRENT_LAYERS, f"a list of {num_layers} times true or false was expected")
    return tuple(not each for each in listed)


def _gguf_pattern(config: DeltaConfig) -> dict[str, Any]:
    """Which layers are attention: every n-th, or a list, which older readers do not know."""
    layers = range(config.num_layers)
    for interval in range(1, config.num_layers + 1):
        if config.attention_layers == tuple((layer + 1) % interval == 0 for layer in layers):
            return {"full_attention_interval": interval}
    return {RECURRENT_LAYERS: [not attends for attends in config.attention_layers] + [False] * config.extra_layers}


def _by_gguf(weight: Weight) -> Weight:
    """A tensor in GGUF's convention: decay rates instead of their logarithms, norms plus one."""
    name = weight.name
    if name.endswith(".ssm_a"):
        return encode_weight(name, -np.exp(weight.dequantize()))
    if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
        return encode_weight(name, weight.dequantize() + np.float32(1))
    return hybrid.squeezed(weight)


FAMILY = Qwen35()
