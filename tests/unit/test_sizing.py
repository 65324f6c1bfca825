"""How many blocks each group of layers gets: the plan, the engine and the backends' memory say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from unspool.cache.blocks import blocks_in_window
from unspool.config import EngineConfig
from unspool.engine.engine import Engine
from unspool.engine.sizing import KvSizes
from unspool.models.checkpoint import Checkpoint
from unspool.models.registry import architecture_of
from unspool.models.shapes import EVERY_FAMILY, SHAPES
from unspool.ops.storage import kv_bytes_per_token, layer_groups
from unspool.planning import Planner, Target

GIB = 1 << 30
CPU = EngineConfig(device="cpu", kv_dtype="f16").with_device_defaults("cpu")


def sizes_of(shape: str, **options: object) -> KvSizes:
    return KvSizes(architecture_of(SHAPES[shape]).storage, SHAPES[shape].context_length, replace(CPU, **options))


@pytest.mark.parametrize("shape", EVERY_FAMILY)
def test_every_layer_that_stores_keys_is_in_one_group(shape: str) -> None:
    layers = architecture_of(SHAPES[shape]).storage
    groups = layer_groups(layers)
    found = sorted(layer for group in groups for layer in group.layers)
    assert found == [index for index, layer in enumerate(layers) if layer.kv is not None]
    assert len({group.window for group in groups}) == len(groups)
    assert all(group.window is not None for group in groups[1:])


def test_windows_take_a_share_that_holds_the_windows_of_what_the_others_hold() -> None:
    sizes = sizes_of("gpt-oss-20b", kv_tokens=131_072)
    blocks = sizes.blocks()
    assert blocks == (4096, 128 * blocks_in_window(128, 32, 1) + 512 // 32), "128 sequences of 1,024 tokens"
    assert sizes.context_length(blocks) == 131_072
    assert sizes.at_once(blocks, 1024) == 128
    assert sizes.at_once(blocks, 131_072) == 1
    few = sizes_of("gpt-oss-20b", kv_tokens=131_072, max_running=1)
    assert few.blocks()[1] == blocks_in_window(128, 32, 512), "at least one sequence, with a step's tokens"
    assert sizes_of("gpt-oss-20b", kv_tokens=320).blocks() == (10, 10), "and never more than the others"


def test_windows_take_no_more_bytes_than_the_other_layers() -> None:
    sizes = sizes_of("gemma3-270m", kv_tokens=131_072)
    blocks = sizes.blocks()
    full, windows = (count * each for count, each in zip(blocks, sizes.bytes_per_token, strict=True))
    assert 0.99 * full < windows <= full
    assert sizes.nbytes(blocks) == 32 * (full + windows) < 131_072 * sum(sizes.bytes_per_token) / 2


@pytest.mark.parametrize("shape", ["gpt-oss-20b", "gemma3-270m", "gemma4-e2b", "mistral-7b", "llama-8b"])
def test_as_many_tokens_as_fit(shape: str) -> None:
    sizes = sizes_of(shape, max_running=64)
    blocks = sizes.blocks(room=3 * GIB)
    assert sizes.nbytes(blocks) <= 3 * GIB
    most = 64 * SHAPES[shape].context_length // 32
    assert blocks[0] == most or sizes.nbytes(sizes.shares(blocks[0] + 1)) > 3 * GIB
    before = 3 * GIB // kv_bytes_per_token(architecture_of(SHAPES[shape]).storage, "f16") // 32
    assert blocks[0] == before if len(blocks) == 1 else blocks[0] > 1.5 * before


def test_a_context_is_as_long_as_the_layers_that_see_it_all_have_room() -> None:
    windowed = sizes_of("mistral-7b")
    least = blocks_in_window(4096, 32, 1)
    assert windowed.context_length((least,)) == 32_768
    assert windowed.context_length((least - 1,)) == 32 * (least - 1)
    assert windowed.at_once((least,), 32_768) == 1
    assert windowed.at_once((least - 1,), 32_768) == 0
    assert sizes_of("gpt-oss-20b").context_length((100, 100)) == 3200


@pytest.mark.parametrize("shape", ["tiny-gemma3", "tiny-mistral", "tiny-gemma4", "tiny"])
@pytest.mark.parametrize("kv_tokens", [256, 4096])
def test_the_plan_is_what_the_engine_takes(shape: str, kv_tokens: int, tiny: Callable[..., Checkpoint]) -> None:
    config = EngineConfig(device="cpu", kv_tokens=kv_tokens, kv_dtype="f16", max_running=4, step_tokens=64)
    checkpoint = tiny(shape)
    plan = Planner("x", checkpoint.config, checkpoint.weights, config, Target("", "cpu", GIB, GIB)).plan()
    engine = Engine(checkpoint, config)
    kv, groups = engine.runner.kv, engine.scheduler.tables.groups
    assert [group.num_blocks for group in groups] == list(kv.num_blocks)
    assert sum(count * nbytes for count, nbytes in zip(kv.num_blocks, kv.block_bytes, strict=True)) == plan.kv_bytes
    assert plan.kv_tokens == kv.num_blocks[0] * kv.block_size
    windows = [group for group in groups if group.window is not None]
    assert [each.kv_tokens for each in plan.windows] == [group.num_blocks * kv.block_size for group in windows]
    assert all(each.held_tokens < each.kv_tokens for each in plan.windows)
