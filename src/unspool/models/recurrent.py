"""Layers that keep a state per sequence instead of keys and values, as data."""

from __future__ import annotations

from unspool.models.blocks import MixerFunction, Place
from unspool.ops import Batch, ConvSpec, KVCache, Part, RecurrenceSpec, Rows
from unspool.ops.storage import State, Storage
from unspool.records import record

CONV, MEMORY = "conv", "memory"  # names of states


@record(frozen=True)
class ShortConv:
    """W_out · (c · conv(b · x)), where W_in computes b, c and x: a convolution over a few tokens, with gates."""

    channels: int
    taps: int

    @property
    def width(self) -> int:
        return 3 * self.channels

    def storage(self) -> Storage:
        return Storage(states=(State(CONV, (self.taps - 1, self.channels)),))

    def bind(self, place: Place) -> MixerFunction:
        ops, scale, channels = place.ops, place.residual_scale, self.channels
        project = place.matrix(("shortconv.in_proj", 3 * channels, place.hidden))
        output = place.matrix(("shortconv.out_proj", place.hidden, channels))
        spec = ConvSpec(
            layer=place.layer,
            state=CONV,
            channels=channels,
            taps=self.taps,
            weight=place.table("shortconv.conv.weight", channels, self.taps),
            start=2 * channels,
            before=0,
            after=channels,
        )

        def forward(x: Rows, residual: Rows | None, batch: Batch, kv: KVCache) -> Rows:
            mixed = ops.short_conv(ops.linear(x, project), spec, batch, kv)
            return ops.linear(mixed, output, None, residual, scale=scale)

        return forward


@record(frozen=True)
class DeltaNet:
    """A gated delta net: W_out · (norm(delta(conv(W_qkv · x))) · silu(W_z · x))"""

    num_heads: int  # heads of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float
    tiled: bool  # value heads that share a key head are num_key_heads apart; else they are neighbours
    joint_gates: bool = False  # one tensor, ssm_ba, holds beta and alpha of each key head's value heads

    @property
    def _values(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def _channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self._values

    @property
    def width(self) -> int:
        return self._channels + self._values + 2 * self.num_heads

    def storage(self) -> Storage:
        conv = State(CONV, (self.taps - 1, self._channels))
        return Storage(states=(conv, State(MEMORY, (self.num_heads, self.key_dim, self.value_dim))))

    def bind(self, place: Place) -> MixerFunction:
        ops, scale, channels, values = place.ops, place.residual_scale, self._channels, self._values
        count = self.num_heads
        gates = [("ssm_ba", 2 * count)] if self.joint_gates else [("ssm_beta", count), ("ssm_alpha", count)]
        parts = [("attn_qkv", channels), ("attn_gate", values), *gates]
        project = place.matrix(*((name, width, place.hidden) for name, width in parts))
        output = place.matrix(("ssm_out", place.hidden, values))
        conv = ConvSpec(
            layer=place.layer,
            state=CONV,
            channels=channels,
            taps=self.taps,
            weight=place.table("ssm_conv1d.weight", channels, self.taps),
            activation="silu",
        )
        delta = RecurrenceSpec(
            kind="delta",
            layer=place.layer,
            state=MEMORY,
            num_heads=count,
            num_key_heads=self.num_key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            rate=place.vector(("ssm_a", count)),
            bias=place.vector(("ssm_dt.bias", count)),
            tiled=self.tiled,
        )
        norm = place.vector(*[("ssm_norm.weight", self.value_dim)] * count)
        heads = [Part(head * self.value_dim, self.value_dim, "rms") for head in range(count)]
        z, gate_parts = [Part(channels, values)], self._gates(channels + values)

        def forward(x: Rows, residual: Rows | None, batch: Batch, kv: KVCache) -> Rows:
            projected = ops.linear(x, project)
            qkv = ops.short_conv(projected, conv, batch, kv)
            mixed = ops.recurrence(qkv, ops.arrange(projected, gate_parts), delta, batch, kv)
            normed = ops.arrange(mixed, heads, norm, self.norm_eps)
            gated = ops.multiply(normed, ops.arrange(projected, z), "silu")
            return ops.linear(gated, output, None, residual, scale=scale)

        return forward

    def _gates(self, start: int) -> list[Part]:
        """Beta of all heads, then alpha of all heads."""
        if not self.joint_gates:
            return [Part(start, 2 * self.num_heads)]
        group = self.num_heads // self.num_key_heads
        starts = [start + 2 * group * head for head in range(self.num_key_heads)]
        return [Part(at, group) for at in starts] + [Part(at + group, group) for at in starts]


@record(frozen=True)
class Mamba2:
    """W_out · norm(scan(conv(W_x · x)) · silu(W_z · x))"""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int  # heads of one group share B and C
    taps: int
    norm_eps: float
    norm_groups: int = 1  # parts of a row that are normed separately
    conv_bias: bool = True

    @property
    def _inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def _channels(self) -> int:
        return self._inner + 2 * self.num_groups * self.state_dim

    @property
    def width(self) -> int:
        return self._inner + self._channels + self.num_heads

    def storage(self) -> Storage:
        conv = State(CONV, (self.taps - 1, self._channels))
        return Storage(states=(conv, State(MEMORY, (self.num_heads, self.state_dim, self.head_dim))))

    def bind(self, place: Place) -> MixerFunction:
        ops, scale, channels, inner = place.ops, place.residual_scale, self._channels, self._inner
        project = place.matrix(("ssm_in", self.width, place.hidden))
        output = place.matrix(("ssm_out", place.hidden, inner))
        conv = ConvSpec(
            layer=place.layer,
            state=CONV,
            channels=channels,
            taps=self.taps,
            weight=place.table("ssm_conv1d.weight", channels, self.taps),
            bias=place.vector(("ssm_conv1d.bias", channels)) if self.conv_bias else None,
            activation="silu",
            start=inner,
        )
        scan = RecurrenceSpec(
            kind="scan",
            layer=place.layer,
            state=MEMORY,
            num_heads=self.num_heads,
            num_key_heads=self.num_groups,
            key_dim=self.state_dim,
            value_dim=self.head_dim,
            rate=place.table("ssm_a", self.num_heads, 1),
            bias=place.vector(("ssm_dt.bias", self.num_heads)),
            skip=place.table("ssm_d", self.num_heads, 1),
        )
        group = inner // self.norm_groups
        norm = place.table("ssm_norm.weight", self.norm_groups, group)
        groups = [Part(index * group, group, "rms") for index in range(self.norm_groups)]
        z, steps = [Part(0, inner)], [Part(inner + channels, self.num_heads)]

        def forward(x: Rows, residual: Rows | None, batch: Batch, kv: KVCache) -> Rows:
            projected = ops.linear(x, project)
            values = ops.short_conv(projected, conv, batch, kv)
            mixed = ops.recurrence(values, ops.arrange(projected, steps), scan, batch, kv)
            gated = ops.multiply(mixed, ops.arrange(projected, z), "silu")
            return ops.linear(ops.arrange(gated, groups, norm, self.norm_eps), output, None, residual, scale=scale)

        return forward
