"""Latent attention (MLA) as data: keys and values of all heads are computed from one short row per token.

A token keeps `latent_dim` values c, from which every head computes its key and value, and one rotated key that all
heads share. Instead of computing keys and values, we project the query into the latent space, and the result back:

    q_h · (K_h · c) = (K_hᵀ · q_h) · c        Σ w · (V_h · c) = V_h · (Σ w · c)

So attention has a single key head, whose keys are [rotated key, c] and whose values are c. Prompts and single tokens
are computed the same way, so a row's bits do not depend on how a prompt was divided into steps.
"""

from __future__ import annotations

from collections.abc import Callable

from unspool.models.blocks import MixerFunction, Place, RmsNorm
from unspool.models.rotary import Rotary
from unspool.ops import AttentionSpec, Batch, KVCache, Part, Rows
from unspool.ops.storage import KeyValues, Storage
from unspool.records import record


@record(frozen=True)
class Mla:
    num_heads: int
    latent_dim: int
    plain_dim: int  # channels of a query that are not rotated
    value_dim: int  # channels of a head's value
    rotary: Rotary
    scale: float  # of attention scores
    norm: RmsNorm  # of latents
    query_dim: int | None = None  # width of the latent of queries; None: they are computed from the stream
    growth: float = 0.0  # queries are multiplied by 1 + growth · log(1 + ⌊position / period⌋)
    period: int = 1

    @property
    def _query(self) -> int:
        return self.plain_dim + self.rotary.dim

    @property
    def _key(self) -> int:
        return self.rotary.dim + self.latent_dim

    @property
    def width(self) -> int:
        """The widest row: every head's query in the latent space, before and after it is assembled, and the key."""
        return 2 * self.num_heads * (self._key + self._query) + 2 * self._key

    def storage(self) -> Storage:
        return Storage(KeyValues(1, self._key, self.latent_dim, latent=True))

    def bind(self, place: Place) -> MixerFunction:
        ops, heads, latent, key_dim = place.ops, self.num_heads, self.latent_dim, self._key
        queries = self._bind_queries(place)
        down = place.matrix(("attn_kv_a_mqa", latent + self.rotary.dim, place.hidden))
        norm = place.vector((self.norm.tensor("attn_kv_a_norm"), latent))
        to_latents = place.experts(heads, ("attn_k_b", latent, self.plain_dim))
        from_latents = place.experts(heads, ("attn_v_b", self.value_dim, latent))
        output = place.matrix(("attn_output", place.hidden, heads * self.value_dim))
        spec, scale, eps = self._spec(place), place.residual_scale, self.norm.eps
        plain = [Part(head * self._query, self.plain_dim) for head in range(heads)]
        normed = [Part(latent, self.rotary.dim), Part(0, latent, "rms")]
        parts = self._parts()

        def forward(x: Rows, residual: Rows | None, batch: Batch, kv: KVCache) -> Rows:
            q = queries(x)
            at_latents = ops.linear_heads(ops.arrange(q, plain), to_latents)
            key = ops.arrange(ops.linear(x, down), normed, norm, eps)
            rows = ops.arrange(ops.join(ops.join(at_latents, q), key), parts)
            mixed = ops.linear_heads(ops.attention(rows, spec, batch, kv), from_latents)
            return ops.linear(mixed, output, None, residual, scale=scale)

        assert spec.row_width == (heads + 1) * key_dim
        return forward

    def _bind_queries(self, place: Place) -> Callable[[Rows], Rows]:
        ops, width = place.ops, self.num_heads * self._query
        if self.query_dim is None:
            direct = place.matrix(("attn_q", width, place.hidden))
            return lambda x: ops.linear(x, direct)
        down = place.matrix(("attn_q_a", self.query_dim, place.hidden))
        norm, eps = place.vector((self.norm.tensor("attn_q_a_norm"), self.query_dim)), self.norm.eps
        up = place.matrix(("attn_q_b", width, self.query_dim))
        return lambda x: ops.linear(ops.norm(ops.linear(x, down), norm, eps), up)

    def _parts(self) -> list[Part]:
        """Each head's rotated query and its query in the latent space, from rows [latents of all heads, queries,
        key]."""
        latents = self.num_heads * self.latent_dim
        parts = []
        for head in range(self.num_heads):
            parts.append(Part(latents + head * self._query + self.plain_dim, self.rotary.dim))
            parts.append(Part(head * self.latent_dim, self.latent_dim))
        return [*parts, Part(latents + self.num_heads * self._query, self._key)]

    def _spec(self, place: Place) -> AttentionSpec:
        return AttentionSpec(
            layer=place.layer,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=self._key,
            scale=self.scale,
            rope=place.rope(self.rotary),
            value_dim=self.latent_dim,
            growth=self.growth,
            period=self.period,
            latent=True,
        )
