"""Whole models on the CUDA backend: near the reference, and the same bits however the rows come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.cuda_setting import MARKS, ON_CARD
from unspool.config import EngineConfig
from unspool.models.random import SHAPES, random_checkpoint
from unspool.models.registry import architecture_of, build
from unspool.ops import Batch
from unspool.ops.cuda import CudaOps, steps
from unspool.ops.cuda.handover import ABSENT
from unspool.ops.reference import ReferenceOps

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

Sequences = Sequence[tuple[int, Sequence[int], Sequence[int]]]  # (first position, tokens, blocks)


def make_batch(sequences: Sequences, block_size: int, *, last: bool = False) -> Batch:
    """Logits of every row, or of each sequence's last."""
    counts = [len(tokens) for _, tokens, _ in sequences]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + len(tokens)) for start, tokens, _ in sequences])
    tables = np.zeros((len(sequences), max(len(blocks) for *_, blocks in sequences)), np.int32)
    for table, (_, _, blocks) in zip(tables, sequences, strict=True):
        table[: len(blocks)] = blocks
    owner = np.repeat(np.arange(len(sequences)), counts)
    return Batch(
        ids=np.concatenate([tokens for _, tokens, _ in sequences]).astype(np.int32),
        positions=positions.astype(np.int32),
        slots=tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size,
        starts=starts,
        tables=tables,
        logit_rows=(starts[1:] - 1 if last else np.arange(starts[-1])).astype(np.int32),
        states=np.array([blocks[0] for *_, blocks in sequences], np.int32),
    )


def make_step(ops: Any, shape: str, format: str, block_size: int = 16, **changes: Any) -> Any:
    config = replace(SHAPES[shape], **changes)
    checkpoint = _checkpoint(shape, format, tuple(sorted(changes.items())))
    model = build(config, checkpoint.weights, ops)
    return ops.compile(model, ops.kv_cache(architecture_of(config).storage, EngineConfig(block_size=block_size), 64))


@cache
def _checkpoint(shape: str, format: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    return random_checkpoint(replace(SHAPES[shape], **dict(changes)), format=format)


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 320, count)


FAMILIES = ["tiny", "tiny-untied", "tiny-mistral", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3"]
FORMATS = ["f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"]
WIDE_FORMATS = ["fp8", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
CASES = [(family, "bf16") for family in FAMILIES]
CASES += [("tiny", format) for format in FORMATS] + [("tiny-wide", format) for format in WIDE_FORMATS]


@pytest.mark.parametrize(("shape", "format"), CASES)
def test_a_model_is_near_the_reference(shape: str, format: str) -> None:
    """A prompt with a window behind it, then a decode among a draft: bf16's error, and no more."""
    tokens = tokens_of(1, 40)
    outs = []
    for ops in (ReferenceOps(), CudaOps()):
        step = make_step(ops, shape, format, num_layers=1 if format != "bf16" else SHAPES[shape].num_layers)
        first = step.run(make_batch([(0, tokens[:6], [3]), (0, tokens[6:9], [5])], 16, last=True)).copy()
        second = step.run(make_batch([(6, tokens[9:10], [3]), (3, tokens[10:13], [5])], 16)).copy()
        outs.append(np.concatenate([first, second]))
    expected, found = outs
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


def launch_rows(step: Any, batch: Batch, rows: Any, sources: np.ndarray | None = None) -> Any:
    """A step and draws as `rows` say."""
    return step.launch_words(batch.arrays(), rows.words(), (rows.is_filtered, rows.wants_logprobs), sources)


def feed(step: Any, tokens: np.ndarray, sizes: Sequence[int], blocks: Sequence[int], block_size: int) -> np.ndarray:
    out, at = [], 0
    for size in sizes:
        out.append(step.run(make_batch([(at, tokens[at : at + size], blocks)], block_size)).copy())
        at += size
    return np.concatenate(out)


def test_a_split_ends_with_a_step_of_every_tile() -> None:
    """33 times 128 columns in two splits: a tile of 256 must not reach into the second."""
    wide = {"num_layers": 1, "vocab_size": 64, "intermediate_size": 4224}
    step = make_step(CudaOps(), "tiny", "bf16", **wide)
    reference = make_step(ReferenceOps(), "tiny", "bf16", **wide)
    batch = make_batch([(0, tokens_of(1, 2) % 64, [1])], 16)
    assert np.abs(step.run(batch) - reference.run(batch)).max() < 0.02 * np.abs(reference.run(batch)).max()


@pytest.mark.parametrize(("shape", "block_size"), [("tiny", 16), ("tiny", 128), ("tiny-mistral", 32)])
def test_pieces_give_the_bits_of_the_whole(shape: str, block_size: int) -> None:
    """Beyond one tile of keys: walked by one program, or kept apart and merged in order."""
    step = make_step(CudaOps(), shape, "bf16", block_size, num_layers=1)
    tokens = tokens_of(2, 136)
    per = -(-136 // block_size)
    whole = feed(step, tokens, [136], range(1, 1 + per), block_size)
    pieces = feed(step, tokens, [3, 127, 1, 1, 4], range(20, 20 + per), block_size)
    assert (whole == pieces).all()


@pytest.mark.parametrize("window", [None, 100])
def test_few_rows_read_tiles_two_at_once_for_the_same_bits(window: int | None) -> None:
    """Where a head is as wide as the matrix unit and a block holds two tiles. Pieces end within a tile, a pair and a
    split; a window begins within a pair."""
    family = {"architecture": "mistral", "rope_style": "half", "sliding_window": window} if window else {}
    step = make_step(CudaOps(), "tiny-wide", "bf16", 128, num_layers=1, **family)
    tokens = tokens_of(8, 266)
    whole = feed(step, tokens, [266], range(1, 4), 128)
    pieces = feed(step, tokens, [189, 1, 2, 64, 1, 1, 2, 6], range(4, 7), 128)
    assert {launch.args["BATCH"] for launch in step.launches_of(1) if launch.label == "attention"} == {2}
    assert (whole == pieces).all()


@pytest.mark.parametrize("window", [None, 100])
def test_prompts_have_the_bits_of_decodes(window: int | None) -> None:
    """Over more than a split, by the kernel for many rows and by the one for few: the first layer's answers reach the
    last row through the second's keys and values."""
    family = {"architecture": "mistral", "rope_style": "half", "sliding_window": window} if window else {}
    step = make_step(CudaOps(), "tiny-wide", "bf16", 128, num_layers=2, **family)
    tokens = tokens_of(9, 264)
    prompt = step.run(make_batch([(0, tokens, range(1, 4))], 128, last=True)).copy()
    assert "attention-prompt" in {launch.label for launch in step._graphs["body", 288, None][0].launches}
    pieces = feed(step, tokens, [250, 14], range(4, 7), 128)  # of all whose logits are wanted
    assert (prompt[0] == pieces[-1]).all()


def test_splits_that_are_kept_apart_give_the_bits_of_a_walk() -> None:
    """A row's splits by one program, four rows' by another, and those of a draft; what was handed over is gone."""
    step = make_step(CudaOps(), "tiny", "bf16", 128, num_layers=1)
    for index in range(len(step.kv.storage)):
        step.kv.layer(index).normal_()
    apart, kinds = step.shapes[0], set()
    for sequences in (
        [(1500, [7], range(1, 13))],
        [(700, [8], range(13, 19)), (600, [9, 10, 11], range(19, 25))],
    ):
        batch, outs = make_batch(sequences, 128), []
        for shape in (replace(apart, capacity=0), apart):
            step.shapes[0] = shape
            outs.append(step.run(batch).copy())
            for *_, end, place, last in steps.divide(batch.arrays(), shape, take_all=True)[0].tolist():
                kinds.add("walked" if place < 0 else f"merged by {last}" if end == 0 else "kept")
        assert (outs[0] == outs[1]).all()
    assert kinds == {"walked", "kept", "merged by 1", "merged by 4"}
    assert (step._shared.attention_partial[0].view(torch.int32) == ABSENT.value).all()


@pytest.mark.parametrize("block_size", [16, 128])  # 128: a kernel of its own walks the crowd
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(block_size: int) -> None:
    step = make_step(CudaOps(), "tiny", "q4_1", block_size, num_layers=1)
    tokens = tokens_of(3, 60)
    alone = [step.run(make_batch([(0, tokens[i : i + 1], [i])], block_size))[0].copy() for i in range(3)]
    crowd = step.run(make_batch([(0, tokens[i : i + 1], [10 + i]) for i in range(21)], block_size))
    assert all((crowd[i] == row).all() for i, row in enumerate(alone))


@pytest.mark.parametrize("shape", ["tiny", "tiny-qwen3", "tiny-gemma3"])
def test_wanted_rows_have_the_bits_of_all(shape: str) -> None:
    """The last layer leaves out the others, which keep their keys and values: a next step finds them."""
    step = make_step(CudaOps(), shape, "bf16", num_layers=2)
    prompts = [(0, tokens_of(3, 11), [1]), (0, tokens_of(4, 4), [2]), (0, tokens_of(5, 1), [3])]
    everything = make_batch(prompts, 16)
    follow = make_batch([(11, [7], [1]), (4, [9, 11], [2])], 16)
    whole, after = step.run(everything).copy(), step.run(follow).copy()
    for wanted in ([10, 14, 15], [0, 1, 8, 12]):
        for index in range(len(step.kv.storage)):
            step.kv.layer(index).zero_()
        some = replace(everything, logit_rows=np.array(wanted, np.int32))
        assert (step.run(some) == whole[wanted]).all(), wanted
    assert (step.run(follow) == after).all()
    body, _ = step._graphs["body", 16, None]
    assert sum(launch.label == "gated" for launch in body.launches) == 1, "of two layers"


def test_tokens_feed_the_next_step_on_the_device() -> None:
    """Launched ahead = stepped plainly, with draws that filter among greedy ones."""
    from unspool.ops.cuda.sampler import SampleRows
    from unspool.sampling import draw, filters

    plain, ahead = (make_step(CudaOps(), "tiny", "bf16", num_layers=1) for _ in range(2))
    prompts = [tokens_of(4, 5), tokens_of(5, 3)]
    blocks = ([1], [2])

    def rows_at(step: int) -> SampleRows:
        rows = SampleRows.greedy(2)
        rows.temperature[1], rows.seed[1], rows.top_k[1], rows.top_p[1] = 0.8, 7, 40, 0.9
        rows.position[:] = [len(prompt) + step for prompt in prompts]
        return rows

    start = make_batch([(0, p, b) for p, b in zip(prompts, blocks, strict=True)], 16, last=True)
    flights = [launch_rows(ahead, start, rows_at(0))]
    for step in range(1, 4):
        sequences = [(len(p) + step - 1, [-1], b) for p, b in zip(prompts, blocks, strict=True)]
        flights.append(launch_rows(ahead, make_batch(sequences, 16), rows_at(step), np.array([0, 1], np.int32)))
        if step > 1:
            flights[step - 2].tokens()
    found = [flight.tokens() for flight in flights]

    logits = plain.run(start)
    for step in range(4):
        row = filters.top_p(filters.top_k(filters.temperature(logits[1], 0.8), 40), 0.9)
        expected = [draw.greedy(logits[0]), draw.draw(row, 7, len(prompts[1]) + step)]
        assert found[step] == expected
        sequences = [(len(p) + step, [t], b) for p, t, b in zip(prompts, expected, blocks, strict=True)]
        logits = plain.run(make_batch(sequences, 16))


def test_a_step_in_the_air_outlives_larger_ones() -> None:
    """Buffers grow with the batch; what was launched before is still there to be read."""
    from unspool.ops.cuda.sampler import SampleRows

    step = make_step(CudaOps(), "tiny", "bf16", num_layers=1)
    step.kv.engine = replace(step.kv.engine, max_running=1)
    small = launch_rows(step, make_batch([(0, [7], [1])], 16), SampleRows.greedy(1))
    large = launch_rows(step, make_batch([(0, [7 + i], [2 + i]) for i in range(3)], 16), SampleRows.greedy(3))
    alone = int(step.run(make_batch([(0, [7], [9])], 16))[0].argmax())
    assert small.tokens() == [alone]
    assert large.tokens()[0] == alone


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_halfway_leaves_nothing_behind(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that cannot be compiled, say: the next request's draw must not know of the row that was not finished."""
    from unspool.ops.cuda.launch import Launch
    from unspool.ops.cuda.sampler import WANTS_LOGPROBS, SampleRows

    step = make_step(CudaOps(), "tiny", "bf16", num_layers=1)
    tokens = [int(step.run(make_batch([(0, [7 + i], [1 + i])], 16))[0].argmax()) for i in range(2)]
    assert tokens[0] != tokens[1]
    run = Launch.run

    def fails(launch: Launch) -> None:
        if launch.label == "logprobs":
            step._shared.attention_partial[0][0, 0, 0] = 1.0  # as if attention had not come to its end
            raise failure("no such kernel")
        run(launch)

    monkeypatch.setattr(Launch, "run", fails)
    wanting = SampleRows.greedy(1)
    wanting.flags[:] = WANTS_LOGPROBS
    with pytest.raises(failure, match="no such kernel"):
        launch_rows(step, make_batch([(0, [7], [5])], 16), wanting)
    assert (step._shared.attention_partial[0].view(torch.int32) == ABSENT.value).all()
    monkeypatch.setattr(Launch, "run", run)
    for i in (1, 0):
        flight = launch_rows(step, make_batch([(0, [7 + i], [6 + i])], 16), SampleRows.greedy(1))
        assert flight.tokens() == [tokens[i]]


def test_a_server_that_fills_up_keeps_its_graphs() -> None:
    from unspool.ops.cuda.sampler import SampleRows

    step = make_step(CudaOps(), "tiny", "bf16", num_layers=1)
    seen: list[Any] = []
    for rows in (1, 2, 3, 5, 9):
        launch_rows(step, make_batch([(0, [7 + i], [1 + i]) for i in range(rows)], 16), SampleRows.greedy(rows))
        graphs = [graph for graph, _ in step._graphs.values()]
        assert graphs[: len(seen)] == seen
        assert len(graphs) == len(seen) + 1
        seen = graphs


def test_blocks_can_be_copied_read_and_written() -> None:
    ops = CudaOps()
    kv = ops.kv_cache(architecture_of(SHAPES["tiny"]).storage, EngineConfig(block_size=16), 4)
    for index in range(len(kv.storage)):
        kv.layer(index).normal_()
    kv.copy_block(1, 2)
    assert kv.read_block(2) == kv.read_block(1) != kv.read_block(3)
    kv.write_block(3, kv.read_block(1))
    assert kv.read_block(3) == kv.read_block(1)
    assert len(kv.read_block(0)) == kv.block_bytes[0]


@pytest.mark.parametrize("sliding", [(True, False), (False, True)])
def test_groups_of_layers_have_blocks_of_their_own(sliding: tuple[bool, bool]) -> None:
    """A decode and a draft: the bits are those of one table for all layers, whatever is in released blocks."""
    config = replace(SHAPES["tiny-gemma3"], num_layers=2, sliding_layers=sliding)
    model = build(config, random_checkpoint(config, format="bf16").weights, CudaOps())
    layers, engine, ops = model.architecture.storage, EngineConfig(block_size=16), CudaOps()
    one, two = ops.kv_cache(layers, engine, 20), ops.kv_cache(layers, engine, (20, 12))
    windowed = sliding.index(True)
    for index in range(2):
        one.layer(index).normal_()
    two.layer(1 - windowed).copy_(one.layer(1 - windowed))
    two.layer(windowed).fill_(60_000.0)
    sequences = [(143, [7], range(9)), (99, [8, 9], range(9, 17))]
    batch, kept = make_batch(sequences, 16).arrays(), {4: 1, 5: 3, 6: 4, 7: 5, 8: 6, 13: 7, 14: 8, 15: 9, 16: 10}
    for block, other in kept.items():
        two.layer(windowed)[other] = one.layer(windowed)[block]
    tables = np.array([[kept.get(block, -1) for block in table] for table in batch.tables], np.int32)
    slots = np.array([kept[slot // 16] * 16 + slot % 16 for slot in batch.slots])
    grouped = replace(batch, tables=np.concatenate([batch.tables, tables]), slots=np.concatenate([batch.slots, slots]))
    expected = ops.compile(model, one).run(batch).copy()
    assert np.isfinite(expected).all()
    assert (ops.compile(model, two).run(grouped) == expected).all()
    two.copy_block(3, 0, 1)
    assert two.read_block(0, 1) == two.read_block(3, 1) != two.read_block(4, 1)
    assert (len(two.read_block(0, 0)), len(two.read_block(0, 1))) == two.block_bytes


def test_many_rows_give_the_bits_of_few() -> None:
    """Past 256 rows programs go from tile to tile, and a row's squares are summed once for all of them."""
    step = make_step(CudaOps(), "tiny", "bf16", 64, num_layers=2)
    tokens = tokens_of(8, 8)
    few = step.run(make_batch([(0, tokens, [1])], 64, last=True)).copy()
    crowd = [(0, tokens_of(seed, 50), [2 + seed]) for seed in range(6)]
    assert (step.run(make_batch([*crowd, (0, tokens, [9])], 64, last=True))[-1] == few[0]).all()


@pytest.mark.skipif(not ON_CARD, reason="the matrix unit's own order of addition is on a card alone")
@pytest.mark.parametrize(
    ("shape", "format"), [("llama-8b", "bf16"), ("llama-1b", "bf16"), ("llama-1b", "fp8"), ("llama-1b", "q4_1")]
)
def test_every_number_of_rows_gives_the_same_bits_at_real_widths(shape: str, format: str) -> None:
    step = make_step(CudaOps(), shape, format, 128, num_layers=2, vocab_size=4096)
    tokens = tokens_of(6, 600)
    whole = feed(step, tokens, [600], range(1, 6), 128)
    sizes = [1, 1, 2, 7, 16, 33, 128, 200, 1, 64, 100, 24, 1, 9]
    for name, blocks in {"launched": range(10, 15), "replayed": range(15, 20)}.items():
        pieces = feed(step, tokens, sizes, blocks, 128)
        piece_of = np.repeat(np.arange(len(sizes)), sizes)
        others = {int(piece) for piece in piece_of[(whole[: len(pieces)] != pieces).any(1)]}
        assert not others, f"{name}: other bits in pieces of {[sizes[piece] for piece in sorted(others)]} rows"
    crowd = [(0, tokens_of(7, 4096), range(20, 52)), (587, tokens[587:588], range(10, 15))]
    assert (step.run(make_batch(crowd, 128, last=True))[1] == whole[587]).all()
