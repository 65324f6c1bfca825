"""Writes tests/fixtures/families/NAME: a tiny random model of each family as transformers saves it, and its logits.

    python scripts/fixture_families.py [NAME ...]        needs torch and transformers

Each folder has config.json, model.safetensors in bf16, and expected.npz: token ids, and float32 logits that
transformers computes of those weights.
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
TOKENS = 24
COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": None,
          "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )


GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}


def causal(kind: str, **differs: Any) -> Callable[[], Any]:
    """A model of transformers' configuration class `kind`, with COMMON's sizes but for what differs."""
    return lambda: transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**{**COMMON, **differs}), attn_implementation="eager"
    )


MODELS: dict[str, Callable[[], Any]] = {
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
    "olmoe": causal("OlmoeConfig", intermediate_size=32, num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
    "smollm3": causal("SmolLM3Config", num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True),
    "starcoder2": causal("Starcoder2Config", sliding_window=8, use_bias=True),
    "mixtral": causal("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "qwen2-moe": causal("Qwen2MoeConfig", **EXPERTS, shared_expert_intermediate_size=40, norm_topk_prob=False),
    "qwen3-moe": causal("Qwen3MoeConfig", **EXPERTS, norm_topk_prob=True),
    "qwen3-moe-dense": causal("Qwen3MoeConfig", **EXPERTS, norm_topk_prob=False, mlp_only_layers=[0]),
}


def randomize(model: Any) -> None:
    """Values that make every tensor matter: norms around their neutral value, biases and matrices of some size."""
    for name, tensor in model.named_parameters():
        deviation = 0.2 if tensor.dim() < 2 else 1.5 / np.sqrt(tensor.shape[-1])
        noise = torch.randn_like(tensor) * deviation
        values = noise if tensor.dim() > 1 or name.endswith("bias") else tensor.data + noise
        tensor.data = values.bfloat16().float()  # rotation speeds, which are no parameters, keep their precision


def write(name: str) -> None:
    torch.manual_seed(sum(name.encode()))
    model = MODELS[name]().eval()
    randomize(model)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(ids).logits[0]
    model.config.bos_token_id = model.config.eos_token_id = 0  # defaults may lie outside the small vocabulary
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(folder / "expected.npz", ids=ids[0].numpy().astype(np.int32), logits=logits.float().numpy())
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir()):,} bytes")


if __name__ == "__main__":
    for each in sys.argv[1:] or MODELS:
        write(each)
