"""What recurrent layers compute, as data. Each layer keeps one state per sequence, which every token updates in turn.

Prompts and single tokens are computed the same way, token by token in one order, so a state's bits do not depend on how
the tokens were divided into steps.
"""

from __future__ import annotations

from typing import Any, Literal

from unspool.config import Activation
from unspool.records import record

Vector = Any  # a backend's own, from Ops.vector


@record(frozen=True)
class ConvSpec:
    """A causal convolution over the last tokens of a sequence, each channel separately.

        after · activation(bias + Σ_j weight[j] · (before · x)[position - taps + 1 + j])

    Its state is the last taps - 1 inputs, oldest first, each with all channels.
    """

    layer: int
    state: str  # the name of its state within the layer
    channels: int
    taps: int
    weight: Vector  # `taps` values per channel
    bias: Vector | None = None
    activation: Activation | None = None
    start: int = 0  # the column of a row where its input begins
    before: int | None = None  # the column where factors of the input begin; None: there are none
    after: int | None = None  # the column where factors of the result begin; None: there are none

    @property
    def least_width(self) -> int:
        """The least number of values that a row must have."""
        return self.channels + max(self.start, self.before or 0, self.after or 0)


@record(frozen=True)
class RecurrenceSpec:
    """A matrix S [key_dim, value_dim] per head, which decays at each token and then adds the token's key and value:

        delta rule   S = decay · S + k · (beta · (v - decay · Sᵀk))ᵀ,  out = Sᵀq
                     decay = exp(rate · softplus(a + bias)),  beta = sigmoid(b),  k = k / |k|,  q = q / |q| / √key_dim
        scan         S = decay · S + k · (dt · v)ᵀ,  out = Sᵀq + skip · v
                     dt = softplus(a + bias),  decay = exp(rate · dt)

    Rows are q, k and v of all heads: in this order for the delta rule, as v, k, q for a scan (Mamba-2's x, B and C).
    Rows of gates are b and a of all heads for the delta rule, a for a scan. `num_key_heads` heads of q and k are shared
    by `num_heads` heads of v: if `tiled`, value head h reads key head h mod num_key_heads; else each group of
    neighbouring value heads shares one. The state is S of all heads, key channel by key channel.
    """

    kind: Literal["delta", "scan"]
    layer: int
    state: str
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    rate: Vector  # of each head, negative
    bias: Vector
    skip: Vector | None = None  # for scans only
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
        """The columns of a row where q, k and v begin."""
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        return (0, keys, 2 * keys) if self.kind == "delta" else (values + keys, values, 0)

    def key_head(self, head: int) -> int:
        """The head whose keys and queries this head reads."""
        return head % self.num_key_heads if self.tiled else head // (self.num_heads // self.num_key_heads)
