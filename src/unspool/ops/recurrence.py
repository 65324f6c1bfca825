"""What recurrent layers compute, as data. Each keeps a state of every sequence, which a token changes before the next.

Prompts and single tokens are computed alike, token by token in one order: a state's bits do not depend on how it was
reached.
"""

from __future__ import annotations

from typing import Any, Literal

from unspool.config import Activation
from unspool.records import record

Vector = Any  # a backend's own, from Ops.vector


@record(frozen=True)
class ConvSpec:
    """A causal convolution over the last tokens of a sequence, each channel by itself.

        after · activation(bias + Σ_j weight[j] · (before · x)[position - taps + 1 + j])

    Its state is the last taps - 1 inputs, oldest first, each with all channels.
    """

    layer: int
    state: str  # the name of its state in the layer
    channels: int
    taps: int
    weight: Vector  # taps values of each channel
    bias: Vector | None = None
    activation: Activation | None = None
    start: int = 0  # the column of a row where its input begins
    before: int | None = None  # where factors of the input begin; None: there are none
    after: int | None = None  # where factors of the result begin

    @property
    def least_width(self) -> int:
        """Values that a row must have."""
        return self.channels + max(self.start, self.before or 0, self.after or 0)


@record(frozen=True)
class RecurrenceSpec:
    """A matrix S [key_dim, value_dim] of each head, which decays with each token and takes it in:

        delta rule   S = decay · S + k · (beta · (v - decay · Sᵀk))ᵀ,  out = Sᵀq
                     decay = exp(rate · softplus(a + bias)),  beta = sigmoid(b),  k = k / |k|,  q = q / |q| / √key_dim
        scan         S = decay · S + k · (dt · v)ᵀ,  out = Sᵀq + skip · v
                     dt = softplus(a + bias),  decay = exp(rate · dt)

    Rows are q, k and v of all heads, in this order for the delta rule, as v, k, q for a scan (Mamba-2's x, B and C).
    Rows of gates are b and a of all heads for the delta rule, a for a scan. `num_key_heads` heads of q and k are shared
    by `num_heads` heads of v: the h-th reads the (h mod num_key_heads)-th where they are `tiled`, else groups of
    neighbours share one. Its state is S of all heads, key channel after key channel.
    """

    kind: Literal["delta", "scan"]
    layer: int
    state: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    rate: Vector  # of each head, below zero
    bias: Vector
    skip: Vector | None = None  # of a scan
    tiled: bool = False
    eps: float = 1e-6  # added to the squares of |k| and |q|

    @property
    def row_width(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def gates_width(self) -> int:
        return self.num_heads * (2 if self.kind == "delta" else 1)

    @property
    def columns(self) -> tuple[int, int, int]:
        """Where q, k and v begin in a row."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return (0, keys, 2 * keys) if self.kind == "delta" else (values + keys, values, 0)

    def key_head(self, head: int) -> int:
        """Whose keys and queries a head reads."""
        return head % self.num_key_heads if self.tiled else head // (self.num_heads // self.num_key_heads)
