# mypy: disallow-untyped-defs=False
"""Which experts rows use, and where each use of an expert is computed. ops/routing.py is the specification.

The use number of an expert by a row is row · USED + use. Few rows are multiplied in their order: every program searches
the uses of all rows for its expert. Many rows are sorted: each expert's uses are contiguous, in whole tiles, so that an
expert's weights are read only for its own rows. No atomic operations are needed: places follow from counts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.ops.cuda.exact import let_next_start, wait_for_previous
from unspool.ops.cuda.finish import sigmoid


@triton.jit
def group_score(choice, members, id, GROUP_TOP: tl.constexpr, E: tl.constexpr):
    """The sum of a group's best scores, added from the best on."""
    total = 0.0
    left = members
    for _ in tl.static_range(GROUP_TOP):
        best = tl.max(tl.where(left, choice, float("-inf")), 0)
        found = tl.min(tl.where(left & (choice == best), id, E), 0)
        total += tl.where(found < E, best, 0.0)
        left = left & (id != found)
    return total


@triton.jit
def in_best_groups(
    choice, id, there, SIZE: tl.constexpr, GROUPS: tl.constexpr, USED_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
    E: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Whether each expert is in one of the best groups; of equal groups the lower number wins."""
    group = tl.arange(0, G)
    scores = tl.full((G,), float("-inf"), tl.float32)
    for each in range(GROUPS):
        score = group_score(choice, there & (id // SIZE == each), id, GROUP_TOP, E)
        scores = tl.where(group == each, score, scores)
    allowed = id < 0
    is_left = group < GROUPS
    for _ in range(USED_GROUPS):
        best = tl.max(tl.where(is_left, scores, float("-inf")), 0)
        found = tl.min(tl.where(is_left & (scores == best), group, G), 0)
        allowed = allowed | (id // SIZE == found)
        is_left = is_left & (group != found)
    return allowed


@triton.jit
def route_kernel(
    scores,  # float32 [row, expert]: the router's logits
    choice_bias,  # float32 [expert], or None
    expert_scale,  # float32 [expert], or None
    slots,  # one per row; -1: a padding row, which uses no expert. None: there are no padding rows
    chosen,  # int32 [row, use]: experts, the best first
    weights,  # float32 [row, use]
    scale,
    EXPERTS: tl.constexpr,
    USED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    USED_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    E: tl.constexpr,  # EXPERTS rounded up to a power of two
    G: tl.constexpr,  # GROUPS rounded up to a power of two
    U: tl.constexpr,  # USED rounded up to a power of two
    PDL: tl.constexpr,
):
    """The experts of one row and their weights. Of equal scores, the lower expert number wins."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    id, use = tl.arange(0, E), tl.arange(0, U)
    there = id < EXPERTS
    logit = tl.load(scores + row * EXPERTS + id, mask=there, other=float("-inf"))
    if SIGMOID:
        score = sigmoid(logit)
    else:
        power = tl.exp(logit - tl.max(logit, 0))
        score = power / tl.sum(power, 0)
    choice = score
    if choice_bias is not None:
        choice = choice + tl.load(choice_bias + id, mask=there, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))  # NaN is chosen last
    if GROUPS > 1:
        SIZE: tl.constexpr = EXPERTS // GROUPS
        allowed = in_best_groups(choice, id, there, SIZE, GROUPS, USED_GROUPS, GROUP_TOP, E, G)
        choice = tl.where(allowed, choice, float("-inf"))
    experts, weight = tl.full((U,), -1, tl.int32), tl.zeros((U,), tl.float32)
    is_left, total = there, 0.0
    for i in range(USED):
        best = tl.max(tl.where(is_left, choice, float("-inf")), 0)
        found = tl.min(tl.where(is_left & (choice == best), id, E), 0)
        value = tl.sum(tl.where(id == found, score, 0.0), 0)
        experts, weight = tl.where(use == i, found, experts), tl.where(use == i, value, weight)
        total += value
        is_left = is_left & (id != found)
    if NORMALIZED:
        weight = weight / (total + 1e-20)
    weight = weight * scale
    inside = use < USED
    if expert_scale is not None:
        weight = weight * tl.load(expert_scale + experts, mask=inside, other=0.0)
    if slots is not None:
        experts = tl.where(tl.load(slots + row) >= 0, experts, -1)
    tl.store(chosen + row * USED + use, experts, mask=inside)
    tl.store(weights + row * USED + use, weight, mask=inside)


@triton.jit
def uses_of_expert(chosen, start, expert, num_uses, B: tl.constexpr):
    """Which of B uses from `start` on belong to an expert."""
    use = start + tl.arange(0, B)
    return use, tl.load(chosen + use, mask=use < num_uses, other=-1) == expert


@triton.jit(do_not_specialize=["num_uses"])
def count_kernel(chosen, counts, num_uses, B: tl.constexpr, PDL: tl.constexpr):
    """Count the rows that use an expert."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert = tl.program_id(0)
    count = 0
    for start in range(0, num_uses, B):
        _, mine = uses_of_expert(chosen, start, expert, num_uses, B)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_uses"])
def place_kernel(
    chosen, counts,
    places,  # int32 [tile, T]: the use that is computed at each place, or -1
    owners,  # int32 [tile]: the tile's expert
    num_tiles,  # int32: the number of tiles
    num_uses,
    EXPERTS: tl.constexpr, E: tl.constexpr, T: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Place an expert's uses, in the order of rows, into its own tiles, which follow those of lower experts."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    expert, id = tl.program_id(0), tl.arange(0, E)
    count = tl.load(counts + id, mask=id < EXPERTS, other=0)
    tiles = (count + T - 1) // T
    first, own = tl.sum(tl.where(id < expert, tiles, 0), 0), tl.sum(tl.where(id == expert, tiles, 0), 0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    missing = tl.sum(tl.where(id == expert, count, 0), 0) + tl.arange(0, T)
    tl.store(places + first * T + missing, -1, mask=missing < own * T)
    for start in range(0, own, B):
        tile = start + tl.arange(0, B)
        tl.store(owners + first + tile, expert, mask=tile < own)
    before = first * T
    for start in range(0, num_uses, B):
        use, mine = uses_of_expert(chosen, start, expert, num_uses, B)
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(places + before + rank, use, mask=mine)
        before += tl.sum(mine.to(tl.int32), 0)
