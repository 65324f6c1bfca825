"""How one family of models is read and built. `Family` is the common decoder; a family's file states its
differences."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unspool.config import Activation, ModelConfig, RopeStyle
from unspool.errors import ModelError
from unspool.models import gguf_keys
from unspool.models.layers import Architecture, Attention, FeedForward, Glu, Layer, RmsNorm
from unspool.models.rotary import Rotary
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile
from unspool.weights.weight import Weight

if TYPE_CHECKING:
    from unspool.models.draft_head import DraftHead

# GGUF's names of tensors, by Hugging Face's names.
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "mlp.gate_proj.bias": "ffn_gate.bias",
    "mlp.up_proj.bias": "ffn_up.bias",
    "mlp.down_proj.bias": "ffn_down.bias",
}


class Family:
    """How models of one family are read, which layers they have, and some of their shapes.

    The defaults describe a decoder with RMS norms before each block, rotary positions and a gated feed-forward.
    """

    shapes: Mapping[str, ModelConfig] = {}  # configs without weights: real ones for benchmarks, tiny ones for tests

    # Reading -----------------------------------------------------------------------------------------------------
    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        """The config of a GGUF file; `keys` are those keys that begin with its architecture's name."""
        common = gguf_keys.common(keys, file, rope_style=self.gguf_rope_style)
        return ModelConfig(**common | {"activation": self.gguf_activation})

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        """The config of a config.json; `name` is the family's name."""
        from unspool.models import hf_keys

        return ModelConfig(**hf_keys.common(fields, name))

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Whether a model runs without this tensor of a GGUF file, because the config has its values or because it does
        not belong to the text model."""
        return name in (gguf_keys.SHORT_FACTORS, gguf_keys.LONG_FACTORS)

    def gguf_tensors(self, config: ModelConfig) -> dict[str, array[float]]:
        """Vectors by which a GGUF file stores numbers of the config, in addition to the weights."""
        return gguf_keys.rope_tensors(config)

    def gguf_keys(self, config: ModelConfig) -> dict[str, Any]:
        """The keys, without the architecture's name, from which `from_gguf` reads `config` back."""
        if config.rope_dim and config.rope_style != self.gguf_rope_style:
            raise ModelError(f"GGUF stores {config.architecture} for {self.gguf_rope_style} rotation")
        return gguf_keys.common_keys(config)

    # If a family rotates neighbouring channels, its GGUF files store the rows of q and k in another order.
    gguf_rope_style: RopeStyle = "half"
    gguf_activation: Activation = "silu"  # GGUF files have no key for it

    whole_names: Mapping[str, str] = WHOLE
    layer_names: Mapping[str, str] = IN_LAYER
    layer_prefix = "model.layers."
    optional_prefixes: tuple[str, ...] = ()  # prefixes that some files put before all names
    unused_suffixes: tuple[str, ...] = (".rotary_emb.inv_freq",)  # tables that follow from the config

    def canonical_name(self, name: str, config: ModelConfig) -> str | None:
        """GGUF's name for a Hugging Face tensor; None if the tensor is not needed; the same name if no mapping is
        known."""
        if name.endswith(self.unused_suffixes):
            return None
        for prefix in self.optional_prefixes:
            name = name.removeprefix(prefix)
        if name == "lm_head.weight" and config.tied_embeddings:  # a second copy of the embedding
            return None
        if name in self.whole_names:
            return self.whole_names[name]
        index, _, rest = name.removeprefix(self.layer_prefix).partition(".")
        canonical = self.canonical_layer_name(rest) if name.startswith(self.layer_prefix) else None
        return name if canonical is None else f"blk.{index}.{canonical}"

    def canonical_layer_name(self, rest: str) -> str | None:
        """GGUF's name for a tensor of a layer, both without the layer's number; None if no mapping is known."""
        return self.layer_names.get(rest)

    def canonical_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        """A Hugging Face tensor with GGUF's names and conventions."""
        canonical = self.canonical_name(name, config)
        return [] if canonical is None else [Weight(canonical, weight.format, weight.shape, weight.raw)]

    # The draft head
    # ------------------------------------------------------------------------------------------------------
    def draft_head(self, config: ModelConfig) -> DraftHead | None:
        """The draft head that a file may have; None if no file of this family has one."""
        return None

    def draft_weights(self, name: str, weight: Weight, config: ModelConfig) -> list[Weight]:
        """A Hugging Face tensor of the draft head with GGUF's names and conventions; empty for all other tensors."""
        return []

    # Layers ------------------------------------------------------------------------------------------------------
    def architecture(self, config: ModelConfig) -> Architecture:
        return Architecture(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            layers=tuple(self.layer(config, index) for index in range(config.num_layers)),
            norm=RmsNorm(config.norm_eps),
            tied_embeddings=config.tied_embeddings,
        )

    def layer(self, config: ModelConfig, index: int) -> Layer:
        norm = RmsNorm(config.norm_eps)
        return Layer(self.attention(config, index), self.feed_forward(config, index), norm=norm, ffn_norm=norm)

    def attention(self, config: ModelConfig, index: int) -> Attention:
        return Attention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary=self.rotary(config, index),
            window=config.window(index),
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
        )

    def rotary(self, config: ModelConfig, index: int) -> Rotary | None:
        """The rotation of a layer; None if it has none."""
        return Rotary(
            config.rope_dim, config.rope_theta, config.rope_style, config.rope_scaling, factors="rope_freqs.weight"
        )

    def feed_forward(self, config: ModelConfig, index: int) -> FeedForward:
        return Glu(config.intermediate_size, config.activation, bias=config.mlp_bias)
