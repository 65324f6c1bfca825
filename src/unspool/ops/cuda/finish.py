# mypy: disallow-untyped-defs=False
"""The epilogues of linear layers, fused with the product: one `EPILOGUE` each.

    stream   residual + y: the float32 stream, its product with the next norm's weight, its groups' sums of squares
    gated    activation(gate) · up, where rows j and j + 8 of every 16 are gate and up of one feature
    heads    rotate q and k (rows j and j + 8 of every 16 are a pair), store k and v in the cache and q in a tensor
    plain    float32, optionally capped: logits, and inputs of a norm

The epilogue's inputs may be prefetched during the products, by read_ahead. Sums come as [feature, token] and are
transposed, so that neighbouring values are stored together. For few tokens the stream is not transposed: with HERE,
each thread computes and stores its own values, because exchanging them would take longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import GROUP, store_here, sum_of_squares

PAIR = tl.constexpr(16)  # rows of a weight tile in which j and j + 8 belong together


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "sigmoid":
        y = sigmoid(x)
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # gelu with tanh(z) as 2 · sigmoid(2z) - 1: 0.5 · x · (1 + tanh(z)) = x · sigmoid(2z)
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def tanh(x):
    # Saturates without overflow: exp of a large number is infinite and 1 - 2 / inf is 1.
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def nothing_ahead(EPILOGUE: tl.constexpr, HERE: tl.constexpr, F: tl.constexpr, T: tl.constexpr):
    """The initial value for read_ahead: (the stream, cos, sin, slots), as far as the epilogue needs them."""
    before, cos, sin, slot = 0.0, 0.0, 0.0, 0
    if EPILOGUE == "stream":
        before = tl.zeros((F, T) if HERE else (T, F), tl.float32)
    elif EPILOGUE == "heads":
        cos, sin = tl.full((F // 2, T), 1.0, tl.float32), tl.zeros((F // 2, T), tl.float32)
        slot = tl.full((T,), -1, tl.int32)
    return before, cos, sin, slot


@triton.jit
def read_ahead(
    ahead, residual, cos, sin, slots, first_f, tokens, num_tokens, features,
    EPILOGUE: tl.constexpr, DETAIL: tl.constexpr, HERE: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Load the epilogue's inputs for tokens below `num_tokens`; keep the given values for the others. Without a
    branch."""
    before, turn_cos, turn_sin, slot = ahead
    if EPILOGUE == "stream":
        place, inside = place_of(first_f, tokens, num_tokens, features, HERE, F)
        before = tl.load(residual + place, mask=inside, other=before)
    elif EPILOGUE == "heads":
        turn_cos, turn_sin = load_turns(cos, sin, first_f, tokens, num_tokens, turn_cos, turn_sin, DETAIL, F)
        slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=slot)
    return before, turn_cos, turn_sin, slot


@triton.jit
def load_row(vector, first_f, features, F: tl.constexpr):
    columns = first_f + tl.arange(0, F)
    return tl.load(vector + columns, mask=columns < features, other=0.0)


@triton.jit
def place_of(first_f, tokens, num_tokens, features, HERE: tl.constexpr, F: tl.constexpr):
    """The addresses of a tile's values, and which of them are inside the matrix."""
    column, token = across(first_f + tl.arange(0, F), not HERE), across(tokens, HERE)
    return token.to(tl.int64) * features + column, (token < num_tokens) & (column < features)


@triton.jit
def across(vector, IS_ROW: tl.constexpr):
    """A vector as [1, n] or [n, 1]."""
    return tl.expand_dims(vector, 0 if IS_ROW else 1)


@triton.jit
def load_turns(cos, sin, first_f, tokens, num_tokens, old_cos, old_sin, DETAIL: tl.constexpr, F: tl.constexpr):
    """cos and sin for a tile's pairs, as [pair, token]; for tokens past the end, the given values."""
    HEADS: tl.constexpr = DETAIL[0]
    KV_HEADS: tl.constexpr = DETAIL[1]
    HEAD_DIM: tl.constexpr = DETAIL[2]
    ROPE_PAIRS: tl.constexpr = DETAIL[3]
    pair = tl.arange(0, F // 2)
    channel = (first_f + pair // 8 * 16 + pair % 8) % HEAD_DIM
    turn = channel // 16 * 8 + channel % 8  # index of the pair within its head
    turned = (first_f + pair * 2 < (HEADS + KV_HEADS) * HEAD_DIM) & (turn < ROPE_PAIRS)
    angle = tokens[None, :] * ROPE_PAIRS + turn[:, None]
    used = (tokens < num_tokens)[None, :] & turned[:, None]
    return tl.load(cos + angle, mask=used, other=old_cos), tl.load(sin + angle, mask=used, other=old_sin)


@triton.jit
def finish(
    total, scale, weight, ahead, bias, residual, out, scaled, next_weight, next_parts, cos, sin, slots, kv, softcap,
    first_f, first_t, num_tokens, features,
    EPILOGUE: tl.constexpr, DETAIL: tl.constexpr, SCALED: tl.constexpr, LOAD: tl.constexpr, HERE: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a tile. A wide tile is written in halves, so that intermediate values do not exceed the registers.

    With LOAD, nothing was prefetched.
    """
    tokens = first_t + tl.arange(0, T)
    if F * T > 8192:
        first, second = tl.split(tl.permute(tl.reshape(total, (F, 2, T // 2)), (0, 2, 1)))
        first_scale, second_scale = scale, scale
        if SCALED:
            first_scale, second_scale = tl.split(tl.permute(tl.reshape(scale, (2, T // 2)), (1, 0)))
        finish(
            first, first_scale, weight, ahead, bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t, num_tokens, features, EPILOGUE, DETAIL, SCALED, LOAD, HERE, F, T // 2, PDL,
        )  # fmt: skip
        finish(
            second, second_scale, weight, ahead, bias, residual, out, scaled,
            next_weight, next_parts, cos, sin, slots, kv, softcap,
            first_f, first_t + T // 2, num_tokens, features, EPILOGUE, DETAIL, SCALED, LOAD, HERE, F, T // 2, PDL,
        )  # fmt: skip
    elif EPILOGUE == "stream":
        finish_stream(
            total, scale, weight, ahead, bias, residual, out, scaled, next_weight, next_parts,
            first_f, tokens, num_tokens, features, SCALED, LOAD, HERE, F, T, PDL,
        )  # fmt: skip
    elif EPILOGUE == "gated":
        finish_gated(total, scale, out, first_f, tokens, num_tokens, features, DETAIL, SCALED, F, T)
    elif EPILOGUE == "heads":
        finish_heads(
            total, scale, ahead, bias, out, cos, sin, slots, kv, first_f, tokens, num_tokens, features,
            DETAIL, SCALED, LOAD, F, T,
        )  # fmt: skip
    else:
        tl.static_assert(EPILOGUE == "plain")
        finish_plain(total, scale, bias, out, softcap, first_f, tokens, num_tokens, features, SCALED, F, T)


@triton.jit
def layer_of(total, scale, bias, first_f, features, SCALED: tl.constexpr, HERE: tl.constexpr, F: tl.constexpr):
    """Complete a linear layer: the sums, times the norm's factors, plus the bias."""
    y = total if HERE else tl.trans(total)
    if SCALED:
        y = y * across(scale, HERE)
    if bias is not None:
        y = y + across(load_row(bias, first_f, features, F), not HERE)
    return y


@triton.jit
def finish_plain(
    total, scale, bias, out, softcap, first_f, tokens, num_tokens, features,
    SCALED: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    y = layer_of(total, scale, bias, first_f, features, SCALED, False, F)
    if softcap is not None:
        y = softcap * tanh(y / softcap)
    place, inside = place_of(first_f, tokens, num_tokens, features, False, F)
    tl.store(out + place, y, mask=inside)


@triton.jit
def finish_stream(
    total, scale, weight, ahead, bias, residual, out, scaled, next_weight, next_parts,
    first_f, tokens, num_tokens, features,
    SCALED: tl.constexpr, LOAD: tl.constexpr, HERE: tl.constexpr, F: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    y = layer_of(total, scale, bias, first_f, features, SCALED, HERE, F)
    place, inside = place_of(first_f, tokens, num_tokens, features, HERE, F)
    stream = (tl.load(residual + place, mask=inside, other=0.0) if LOAD else ahead[0]) + y
    store_here(out + place, stream, inside, HERE and PDL)
    if next_weight is not None:
        if LOAD:
            weight = load_row(next_weight, first_f, features, F)
        store_here(scaled + place, (stream * across(weight, not HERE)).to(tl.bfloat16), inside, HERE and PDL)
        GROUPS: tl.constexpr = F // GROUP
        grouped = tl.reshape(tl.where(inside, stream, 0.0), (GROUPS, GROUP, T) if HERE else (T, GROUPS, GROUP))
        squares = sum_of_squares(grouped, 1 if HERE else 2)
        squares = tl.reshape(squares, (GROUPS, T) if HERE else (T, GROUPS))
        group, token = across(first_f // GROUP + tl.arange(0, GROUPS), not HERE), across(tokens, HERE)
        inside = (token < num_tokens) & (group < tl.cdiv(features, GROUP))
        store_here(next_parts + group * num_tokens + token, squares, inside, HERE and PDL)


@triton.jit
def finish_gated(
    total, scale, out, first_f, tokens, num_tokens, features,
    ACTIVATION: tl.constexpr, SCALED: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    if SCALED:
        total = total * scale[None, :]
    gate, up = halves(total, F, T)
    y = tl.trans((activate(gate, ACTIVATION) * up).to(tl.bfloat16))
    place, inside = place_of(first_f // 2, tokens, num_tokens, features // 2, False, F // 2)
    tl.store(out + place, y, mask=inside)


@triton.jit
def halves(acc, F: tl.constexpr, T: tl.constexpr):
    """The two halves of each pair, as [pair, token]. One thread of the matrix unit holds both, so nothing is moved."""
    grouped = tl.reshape(acc, (F // PAIR, 2, PAIR // 2, T))
    first, second = tl.split(tl.permute(grouped, (0, 2, 3, 1)))
    return tl.reshape(first, (F // 2, T)), tl.reshape(second, (F // 2, T))


@triton.jit
def whole(first, second, F: tl.constexpr, T: tl.constexpr):
    """The inverse of halves()."""
    joined = tl.reshape(tl.join(first, second), (F // PAIR, PAIR // 2, T, 2))
    return tl.reshape(tl.permute(joined, (0, 3, 1, 2)), (F, T))


@triton.jit
def to_half(x):
    """Convert to float16, limited to its largest number: a cache slot may be read, with weight 0, by other
    sequences."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
def finish_heads(
    total, scale, ahead, bias, out, cos, sin, slots, kv, first_f, tokens, num_tokens, features,
    DETAIL: tl.constexpr, SCALED: tl.constexpr, LOAD: tl.constexpr, F: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = DETAIL[0]
    KV_HEADS: tl.constexpr = DETAIL[1]
    HEAD_DIM: tl.constexpr = DETAIL[2]
    BLOCK_SIZE: tl.constexpr = DETAIL[4]
    if LOAD:
        ahead = read_ahead(
            nothing_ahead("heads", False, F, T), None, cos, sin, slots, first_f, tokens, num_tokens, features,
            "heads", DETAIL, False, F,
        )  # fmt: skip
    _, c, s, slot = ahead
    column, token, slot = (first_f + tl.arange(0, F))[None, :], tokens[:, None], slot[:, None]
    if SCALED:
        total = total * scale[None, :]
    if bias is not None:
        total = total + load_row(bias, first_f, features, F)[:, None]
    if first_f < (HEADS + KV_HEADS) * HEAD_DIM:
        a, b = halves(total, F, T)
        total = whole(a * c - b * s, a * s + b * c, F, T)
    y = tl.trans(to_half(total))
    if first_f < HEADS * HEAD_DIM:
        is_q = (token < num_tokens) & (column < HEADS * HEAD_DIM)
        tl.store(out + token.to(tl.int64) * (HEADS * HEAD_DIM) + column, y, mask=is_q)
    if first_f + F > HEADS * HEAD_DIM:
        head, channel = column // HEAD_DIM - HEADS, column % HEAD_DIM
        # [block, kv head, key or value, slot, channel]
        inner = (head % KV_HEADS * 2 + head // KV_HEADS) * (BLOCK_SIZE * HEAD_DIM) + channel
        outer = slot // BLOCK_SIZE * (2 * KV_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
        is_kv = (slot >= 0) & (head >= 0) & (column < features)
        tl.store(kv + outer.to(tl.int64) * HEAD_DIM + inner, y, mask=is_kv)
