"""Writes tests/fixtures/families/NAME: a tiny random model of each family as transformers saves it, and its logits.

    python scripts/fixture_families.py [NAME ...]        needs torch and transformers

Each folder has config.json, model.safetensors in bf16, and expected.npz, which transformers computes of those weights
in float32: 600 token ids, the logits of the first 24 and of the last 4, and each token's logprob after those before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent.parent / "tests" / "fixtures" / "families"
TOKENS, FIRST, LAST = 600, 24, 4
COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 640, "pad_token_id": None,
          "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=640)
    )


GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0}
# Contexts and windows that 600 tokens go beyond.
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4],
            "long_factor": [1.0, 1.5, 2.5, 3.0, 4.5, 6.0], "partial_rotary_factor": 0.75}  # fmt: skip
GROWTH = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0}
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # of 16 channels, where a class has no head_dim
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
QWEN2_EXPERTS = EXPERTS | WIDE_HEADS  # llama.cpp takes the heads to be as wide as the stream, all together


def causal(kind: str, **differs: Any) -> Callable[[], Any]:
    """A model of transformers' configuration class `kind`, with COMMON's sizes but for what differs."""
    return lambda: transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**{**COMMON, **differs}), attn_implementation="eager"
    )


SIGMOID = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
           "routed_scaling_factor": 1.5}  # fmt: skip
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "final_logit_softcapping": 30.0,
          "vocab_size_per_layer_input": 96}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "rope_theta": 10_000.0, "factor": factor}


def local_and(whole: dict[str, Any]) -> dict[str, Any]:
    """Rotation of sliding layers and of the others."""
    return {SLIDING: {"rope_type": "default", "rope_theta": 10_000.0}, FULL: whole}


def pattern(letters: str) -> list[str]:
    """Kinds of layers: s slides, f sees everything."""
    return [SLIDING if letter == "s" else FULL for letter in letters]


def wrapped(kind: str, text: dict[str, Any], vision: dict[str, Any]) -> Callable[[], Any]:
    """A model that reads images, too; its configuration class is `kind`."""
    return lambda: transformers.AutoModelForImageTextToText.from_config(
        getattr(transformers, kind)(
            text_config={**COMMON, **text},
            vision_config=vision,
            image_token_id=1,
            video_token_id=2,
            vision_start_token_id=3,
            vision_end_token_id=4,
            image_token_index=1,
        ),
        attn_implementation="eager",
    )


SIGLIP = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip
QWEN_EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
             "embed_dim": 16, "patch_size": 4, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0],
             "num_position_embeddings": 16}  # fmt: skip
# Latent attention; a cache keeps 32 + 16 values of a token.
MLA = {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
       "num_hidden_layers": 3, "first_k_dense_replace": 1}  # fmt: skip
MLA_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32.0, "beta_slow": 1.0}
GROUPS = {"n_group": 4, "topk_group": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}

LINEAR = "linear_attention"
DELTA = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "partial_rotary_factor": 0.25,
         "num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "linear_num_key_heads": 2,
         "linear_key_head_dim": 16, "linear_value_head_dim": 16, "intermediate_size": 48, "rms_norm_eps": 1e-6,
         "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_expand": 2,
         "num_hidden_layers": 2, "intermediate_size": 16, "shared_intermediate_size": 32,
         "rms_norm_eps": 1e-5}  # fmt: skip
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16,
            "layer_norm_epsilon": 1e-5, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5}  # fmt: skip
ONE_OF_EACH = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
DELTA_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                 "shared_expert_intermediate_size": 24}  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    "gemma4-images": wrapped(
        "Gemma4Config",
        GEMMA4
        | {
            "pad_token_id": 5,
            "layer_types": pattern("sf"),
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 16,
        },
        {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "head_dim": 8,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
    ),
    "gemma3-images": wrapped(
        "Gemma3Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 16,
            "layer_types": pattern("sf"),
            "rope_parameters": local_and(linear(8.0)),
        },
        SIGLIP,
    ),
    "mistral3-images": wrapped(
        "Mistral3Config",
        {"model_type": "ministral3", "rope_parameters": GROWTH, "head_dim": 16},
        SIGLIP | {"model_type": "pixtral"},
    ),
    "mistral-images": wrapped(
        "Mistral3Config",
        {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
        SIGLIP | {"model_type": "pixtral"},
    ),
    "qwen2-vl": wrapped("Qwen2VLConfig", WIDE_HEADS | {"rope_parameters": MROPE}, QWEN_EYES | {"hidden_size": 32}),
    "qwen2.5-vl": wrapped("Qwen2_5_VLConfig", WIDE_HEADS | {"rope_parameters": MROPE}, QWEN_EYES),
    "qwen3-vl": wrapped("Qwen3VLConfig", {"rope_parameters": MROPE, "head_dim": 16}, QWEN_EYES),
    "qwen3-vl-moe": wrapped(
        "Qwen3VLMoeConfig",
        EXPERTS
        | {
            "moe_intermediate_size": 48,
            "rope_parameters": MROPE,
            "decoder_sparse_step": 1,
        },
        QWEN_EYES,
    ),
    "llama": causal("LlamaConfig", head_dim=16, rope_parameters=LLAMA3),
    "llama-gelu": causal("LlamaConfig", head_dim=16, mlp_bias=True, hidden_act="gelu"),
    "llama-biases": causal("LlamaConfig", head_dim=16, attention_bias=True, mlp_bias=True),
    "llama-gelu-tanh": causal("LlamaConfig", hidden_act="gelu_pytorch_tanh", head_dim=16),
    "llama-linear": causal("LlamaConfig", head_dim=16, rope_parameters=linear(4.0), tie_word_embeddings=True),
    "llama-dynamic": causal("LlamaConfig", head_dim=16, rope_parameters=linear(4.0) | {"rope_type": "dynamic"}),
    "llama-yarn": causal("LlamaConfig", head_dim=16, rope_parameters=YARN),
    "mistral": causal("MistralConfig", sliding_window=16, head_dim=16),
    "ministral": causal("MinistralConfig", sliding_window=16, head_dim=16, layer_types=pattern("sf")),
    "ministral3": causal("Ministral3Config", rope_parameters=GROWTH, head_dim=16),
    "qwen2": causal("Qwen2Config", **WIDE_HEADS, tie_word_embeddings=True),
    "qwen2-sliding": causal(
        "Qwen2Config", **WIDE_HEADS, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": causal("Qwen3Config", head_dim=16),
    "qwen3-sliding": causal(
        "Qwen3Config", head_dim=16, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "gemma3": causal(
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        layer_types=pattern("ssf"),
        num_hidden_layers=3,
        rope_parameters=local_and(linear(8.0)),
    ),
    "phi3": causal("Phi3Config", **WIDE_HEADS, partial_rotary_factor=0.75, sliding_window=48),
    "phi3-long": causal("Phi3Config", **WIDE_HEADS, rope_parameters=LONGROPE, original_max_position_embeddings=64),
    "phi3-short": causal(
        "Phi3Config",
        **WIDE_HEADS,
        rope_parameters=LONGROPE | {"original_max_position_embeddings": 640},
        original_max_position_embeddings=640,
    ),
    "glm4": causal("Glm4Config", head_dim=16),
    "glm4-moe": causal(
        "Glm4MoeConfig",
        **SIGMOID,
        head_dim=16,
        use_qk_norm=True,
        attention_bias=True,
        first_k_dense_replace=1,
        num_hidden_layers=3,
    ),
    "glm4-moe-groups": causal(
        "Glm4MoeConfig", **SIGMOID, head_dim=16, n_group=4, topk_group=2, first_k_dense_replace=0
    ),
    "deepseek-v2-lite": causal(
        "DeepseekV2Config", **MLA, **SIGMOID, q_lora_rank=None, rope_parameters=MLA_YARN, topk_method="greedy"
    ),
    "deepseek-v2": causal(
        "DeepseekV2Config", **MLA, **SIGMOID, **GROUPS, q_lora_rank=24, topk_method="group_limited_greedy"
    ),
    "deepseek-v3": causal(
        "DeepseekV3Config",
        **MLA,
        **SIGMOID,
        **GROUPS,
        q_lora_rank=24,
        rope_parameters=MLA_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4-moe-lite": causal(
        "Glm4MoeLiteConfig",
        **{key: value for key, value in MLA.items() if key != "first_k_dense_replace"},
        **SIGMOID,
        q_lora_rank=24,
        rms_norm_eps=1e-6,
    ),
    "mistral4": lambda: transformers.Mistral4ForCausalLM(
        transformers.Mistral4Config(
            **COMMON | MLA | SIGMOID | {"first_k_dense_replace": 0, "num_hidden_layers": 2}, q_lora_rank=24,
            rope_parameters=GROWTH, n_group=1, topk_group=1, attn_implementation="eager",
        )
    ),
    "minimax-m2": causal(
        "MiniMaxM2Config", intermediate_size=32, head_dim=16, rotary_dim=8, num_local_experts=8, num_experts_per_tok=3
    ),
    "gemma4": causal(
        "Gemma4TextConfig",
        **GEMMA4,
        num_hidden_layers=4,
        layer_types=pattern("sfsf"),
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=16,
        num_key_value_heads=1,
    ),
    "gemma4-dense": causal(
        "Gemma4TextConfig",
        **GEMMA4,
        num_hidden_layers=3,
        layer_types=pattern("ssf"),
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    "gemma4-moe": causal(
        "Gemma4TextConfig",
        **GEMMA4,
        layer_types=pattern("sf"),
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=32,
    ),
    "gemma3n": causal(
        "Gemma3nTextConfig",
        head_dim=16,
        num_hidden_layers=4,
        num_key_value_heads=1,
        layer_types=pattern("sfsf"),
        sliding_window=16,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=80,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        intermediate_size=[48, 64, 64, 64],
        activation_sparsity_pattern=[0.6, 0.8, 0.0, 0.0],
    ),
    "qwen2-moe-sliding": causal(
        "Qwen2MoeConfig",
        **QWEN2_EXPERTS,
        shared_expert_intermediate_size=40,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=8,
    ),
    "gpt2": gpt2,
    "gemma": causal("GemmaConfig", head_dim=16),
    "gemma2": causal("Gemma2Config", head_dim=16, sliding_window=8, query_pre_attn_scalar=16, num_hidden_layers=3),
    "gpt-oss": causal(
        "GptOssConfig", intermediate_size=32, head_dim=16, num_local_experts=8, num_experts_per_tok=3, sliding_window=8
    ),
    "granite": causal("GraniteConfig", **GRANITE),
    "granite-moe": causal(
        "GraniteMoeConfig", **GRANITE, intermediate_size=32, num_local_experts=8, num_experts_per_tok=3
    ),
    "olmo2": causal("Olmo2Config"),
    "olmoe": causal("OlmoeConfig", num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, num_experts=8,
                    num_experts_per_tok=3, norm_topk_prob=False),
    "smollm3": causal("SmolLM3Config", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True),
    "starcoder2": causal("Starcoder2Config", sliding_window=8, use_bias=True),
    "lfm2": causal("Lfm2Config", layer_types=["conv", "full_attention", "conv"], num_hidden_layers=3, norm_eps=1e-5,
                   block_multiple_of=32),
    "qwen3.5": causal("Qwen3_5TextConfig", **DELTA, linear_num_value_heads=4),
    "qwen3.5-images": wrapped("Qwen3_5Config", DELTA | ONE_OF_EACH | {"linear_num_value_heads": 2}, QWEN_EYES),
    "qwen3.5-moe": causal("Qwen3_5MoeTextConfig", **DELTA | ONE_OF_EACH | DELTA_EXPERTS, linear_num_value_heads=4),
    "qwen3-next": causal("Qwen3NextConfig", **DELTA | ONE_OF_EACH | DELTA_EXPERTS, linear_num_value_heads=4),
    "granite-hybrid": causal("GraniteMoeHybridConfig", **GRANITE, **MAMBA, num_local_experts=4, num_experts_per_tok=2,
                             layer_types=[LINEAR, FULL]),
    "granite-hybrid-dense": causal("GraniteMoeHybridConfig", **GRANITE, **MAMBA | {"num_hidden_layers": 3},
                                   num_local_experts=0, layer_types=[LINEAR, FULL, LINEAR]),
    "granite-4-dense": causal("GraniteMoeHybridConfig", **GRANITE, **MAMBA, num_local_experts=0,
                              layer_types=[FULL, FULL], position_embedding_type="rope"),
    "granite-moe-shared": causal("GraniteMoeSharedConfig", **GRANITE, intermediate_size=16, num_local_experts=4,
                                 num_experts_per_tok=2, shared_intermediate_size=24),
    "nemotron-h": causal("NemotronHConfig", **NEMOTRON, layers_block_type=[LINEAR, "mlp", FULL, LINEAR]),
    "nemotron-h-moe": causal("NemotronHConfig", **NEMOTRON, layers_block_type=[LINEAR, "moe", FULL, "moe"]),
    "nemotron-h-latents": causal("NemotronHConfig", **NEMOTRON, layers_block_type=[FULL, "moe", LINEAR],
                                 moe_latent_size=16),
    "lfm2-moe": causal("Lfm2MoeConfig", layer_types=["conv", "full_attention"], norm_eps=1e-5, intermediate_size=32,
                       num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1),
    "mixtral": causal("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "qwen2-moe": causal("Qwen2MoeConfig", **QWEN2_EXPERTS, shared_expert_intermediate_size=40, norm_topk_prob=False),
    "qwen3-moe": causal("Qwen3MoeConfig", **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-dense": causal("Qwen3MoeConfig", **EXPERTS, norm_topk_prob=False, mlp_only_layers=[0]),
}


def randomize(model: Any) -> None:
    """Values that make every tensor matter: norms around their neutral value, biases and matrices of some size."""
    stored = ("correction_bias", "expert_bias", "layer_scalar")
    buffers = [each for each in model.named_buffers() if each[0].endswith(stored)]
    for name, tensor in [*model.named_parameters(), *buffers]:
        deviation = 0.2 if tensor.dim() < 2 else 1.5 / np.sqrt(tensor.shape[-1])
        noise = torch.randn_like(tensor) * deviation
        values = noise if tensor.dim() > 1 or name.endswith("bias") else tensor.data + noise
        if name.endswith("A_log"):  # so that states remember some ten to a hundred tokens
            values = torch.randn_like(tensor) - 3
        tensor.data = values.bfloat16().float()  # rotation speeds, which are no parameters, keep their precision


def write(name: str) -> None:
    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]().eval()
    randomize(model)
    first = 8 if name == "gemma4-images" else 0  # those before stand for images, and Gemma 4 reads padding instead
    config = model.config.get_text_config()  # where a second table has fewer tokens, they are those of text
    ids = torch.randint(first, getattr(config, "vocab_size_per_layer_input", config.vocab_size), (1, TOKENS))
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    logprobs = torch.log_softmax(logits[:-1].double(), 1).gather(1, ids[0, 1:, None])[:, 0].float()
    model.config.bos_token_id = model.config.eos_token_id = 0  # defaults may lie outside the small vocabulary
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    saved = json.loads((folder / "config.json").read_text())
    saved.pop("transformers_version", None)
    (folder / "config.json").write_text(json.dumps(saved, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(
        folder / "expected.npz",
        ids=ids[0].numpy().astype(np.int32),
        logits=torch.cat([logits[:FIRST], logits[-LAST:]]).numpy(),
        logprobs=logprobs.numpy(),
    )
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        write(each)
