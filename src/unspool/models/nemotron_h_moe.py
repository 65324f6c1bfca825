"""Nemotron 3: Nemotron-H with experts in place of its feed-forward; GGUF has another name for it."""

from __future__ import annotations

from dataclasses import replace

from unspool.models.nemotron_h import ATTENTION, KINDS, MOE, NANO_9B, SCAN, TINY_NEMOTRON, NemotronH

TINY_NEMOTRON_MOE = replace(
    TINY_NEMOTRON, architecture="nemotron_h_moe", intermediate_size=64, num_experts=8, num_used_experts=3,
    expert_width=64, shared_width=96, routed_scale=2.5, kinds=(SCAN, MOE, ATTENTION, MOE),
)  # fmt: skip
NANO_30B_A3B = replace(
    NANO_9B, architecture="nemotron_h_moe", num_layers=52, hidden_size=2688, num_heads=32, num_kv_heads=2,
    intermediate_size=1856, context_length=262_144, mamba_heads=64, mamba_head_dim=64, num_experts=128,
    num_used_experts=6, expert_width=1856, shared_width=3712, routed_scale=2.5,
    kinds=tuple(KINDS[each] for each in "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
)  # fmt: skip


class NemotronHMoe(NemotronH):
    shapes = {"nemotron-3-nano-30b-a3b": NANO_30B_A3B, "tiny-nemotron-h-moe": TINY_NEMOTRON_MOE}


FAMILY = NemotronHMoe()
