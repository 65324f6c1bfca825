"""Heads that predict a token further ahead, in plain numpy: the formulas, all rows at once, nothing of ops/.

transformers drops the weights of these heads, so this is what they are compared with. Weights are float64 arrays by
their names without the layer's number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from unspool.models.deepseek_v3 import LatentConfig
from unspool.models.expert_config import ExpertConfig
from unspool.models.glm4_moe import SigmoidExpertConfig
from unspool.models.qwen3_5 import DeltaConfig

Weights = Mapping[str, np.ndarray]


def head_rows(w: Weights, embedded: np.ndarray, hidden: np.ndarray, config: DeltaConfig | SigmoidExpertConfig):
    """A head's rows after its norm: row i of the model's hidden row i and the embedding of token i + 1."""
    eps = config.norm_eps
    both = [rms(embedded, w["nextn.enorm.weight"], eps), rms(hidden, w["nextn.hnorm.weight"], eps)]
    x = np.concatenate(both, axis=1) @ w["nextn.eh_proj.weight"].T
    attend = latent_attention if isinstance(config, LatentConfig) else attention
    x = x + attend(w, rms(x, w["attn_norm.weight"], eps), config)
    norm = "ffn_norm.weight" if isinstance(config, LatentConfig) else "post_attention_norm.weight"
    x = x + feed_forward(w, rms(x, w[norm], eps), config)
    return rms(x, w["nextn.shared_head_norm.weight"], eps)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def rotated(x: np.ndarray, dim: int, theta: float, style: str) -> np.ndarray:
    """x [row, head, channel], whose first `dim` channels turn with the row's number."""
    angles = np.arange(len(x))[:, None] / theta ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (slice(0, dim // 2), slice(dim // 2, dim))
    if style == "interleaved":
        first, second = slice(0, dim, 2), slice(1, dim, 2)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q, k, v [row, head, channel]; as many rows of values, heads side by side."""
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = np.einsum("hij,jhd->ihd", powers / powers.sum(axis=-1, keepdims=True), v)
    return mixed.reshape(len(q), -1)


def attention(w: Weights, x: np.ndarray, config: DeltaConfig | SigmoidExpertConfig) -> np.ndarray:
    """Qwen 3.5's, whose rows of q have a gate behind each head; or GLM 4.5's, with biases and without gates."""
    heads, kv_heads, dim, gate = config.num_heads, config.num_kv_heads, config.head_dim, isinstance(config, DeltaConfig)

    def projected(name: str, count: int) -> np.ndarray:
        return (x @ w[f"attn_{name}.weight"].T + w.get(f"attn_{name}.bias", 0)).reshape(len(x), count, -1)

    q, k, v = projected("q", heads), projected("k", kv_heads), projected("v", kv_heads)
    gates = q[..., dim:].reshape(len(x), -1)
    q, k = (
        rotated(rms(each, w[f"attn_{name}_norm.weight"], config.norm_eps), config.rope_dim, config.rope_theta, "half")
        for name, each in (("q", q[..., :dim]), ("k", k))
    )
    k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (k, v))
    mixed = attended(q, k, v)
    return (mixed * sigmoid(gates) if gate else mixed) @ w["attn_output.weight"].T


def latent_attention(w: Weights, x: np.ndarray, config: LatentConfig) -> np.ndarray:
    """DeepSeek V3's: every head makes its keys and values of the latents."""
    heads, turned, plain = config.num_heads, config.rope_dim, config.head_dim - config.rope_dim
    q = rms(x @ w["attn_q_a.weight"].T, w["attn_q_a_norm.weight"], config.latent_eps) @ w["attn_q_b.weight"].T
    q = q.reshape(len(x), heads, -1)
    short = x @ w["attn_kv_a_mqa.weight"].T
    latents = rms(short[:, : config.latent_dim], w["attn_kv_a_norm.weight"], config.latent_eps)
    own = np.einsum("il,hlc->ihc", latents, w["attn_k_b.weight"])
    values = np.einsum("il,hcl->ihc", latents, w["attn_v_b.weight"])
    shared = rotated(short[:, None, config.latent_dim :], turned, config.rope_theta, "interleaved")
    q = np.concatenate([q[..., :plain], rotated(q[..., plain:], turned, config.rope_theta, "interleaved")], axis=-1)
    k = np.concatenate([own, np.repeat(shared, heads, axis=1)], axis=-1)
    return attended(q, k, values) @ w["attn_output.weight"].T


def feed_forward(w: Weights, x: np.ndarray, config: DeltaConfig | SigmoidExpertConfig) -> np.ndarray:
    def glu(rows: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return silu(rows @ gate.T) * (rows @ up.T) @ down.T

    if not isinstance(config, ExpertConfig) or not config.num_experts:
        return glu(x, *(w[f"ffn_{name}.weight"] for name in ("gate", "up", "down")))
    gate, up, down = (w[f"ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
    shared = glu(x, *(w[f"ffn_{name}_shexp.weight"] for name in ("gate", "up", "down")))
    logits = x @ w["ffn_gate_inp.weight"].T
    if isinstance(config, SigmoidExpertConfig):
        scores = sigmoid(logits)
        choice, scale = scores + w["exp_probs_b.bias"], config.routed_scale
    else:
        scores = choice = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        shared, scale = shared * sigmoid(x @ w["ffn_gate_inp_shexp.weight"].reshape(-1, 1)), 1.0
    out = shared
    for row in range(len(x)):
        allowed = choice[row]
        if getattr(config, "num_groups", 1) > 1:
            groups = np.split(allowed, config.num_groups)
            best = np.argsort([-np.sort(group)[-2:].sum() for group in groups], kind="stable")
            used = set(best[: config.num_used_groups])
            allowed = np.concatenate([g if i in used else np.full(len(g), -np.inf) for i, g in enumerate(groups)])
        chosen = np.argsort(-allowed, kind="stable")[: config.num_used_experts]
        weights = scores[row, chosen] / (scores[row, chosen].sum() if config.normalized else 1.0) * scale
        for weight, expert in zip(weights, chosen, strict=True):
            out[row] += weight * glu(x[row : row + 1], gate[expert], up[expert], down[expert])[0]
    return out
