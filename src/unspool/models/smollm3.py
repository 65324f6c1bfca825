"""SmolLM 3: Llama in which every fourth layer has no rotation."""

from __future__ import annotations

from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models import gguf_keys, hf_keys
from unspool.models.family import Family
from unspool.models.limits import every_nth_is_global
from unspool.models.llama import TINY
from unspool.models.rotary import Rotary
from unspool.records import record
from unspool.weights.fields import Fields
from unspool.weights.gguf import GGUFFile

PATTERN = 4  # the only pattern that GGUF files can store


@record(frozen=True)
class SmolLm3Config(ModelConfig):
    rotated: tuple[bool, ...] = ()  # which layers rotate queries and keys


class SmolLm3(Family):
    gguf_rope_style = "interleaved"
    shapes = {
        "tiny-smollm3": SmolLm3Config(
            **vars(replace(TINY, architecture="smollm3", num_layers=4)),
            rotated=every_nth_is_global(PATTERN, 4),
        )
    }

    def from_gguf(self, keys: Fields, file: GGUFFile) -> ModelConfig:
        common = gguf_keys.common(keys, file, rope_style=self.gguf_rope_style)
        return SmolLm3Config(**common, rotated=every_nth_is_global(PATTERN, common["num_layers"]))

    def from_hf(self, fields: Fields, name: str) -> ModelConfig:
        common = hf_keys.common(fields, name, theta=2_000_000.0, tied_embeddings=True)
        if fields.boolean("use_sliding_window", False):
            fields.fail("use_sliding_window", "SmolLM 3's sliding layers are not supported")
        layers = fields.get("no_rope_layers")
        interval = fields.integer("no_rope_layer_interval", PATTERN, high=1024)
        rotated = every_nth_is_global(interval, common["num_layers"])
        if layers is not None:
            if not isinstance(layers, list) or len(layers) != common["num_layers"] or set(layers) - {0, 1}:
                fields.fail("no_rope_layers", f"a list of {common['num_layers']} times 0 or 1 was expected")
            rotated = tuple(each == 1 for each in layers)
        return SmolLm3Config(**common, rotated=rotated)

    def rotary(self, config: ModelConfig, index: int) -> Rotary | None:
        assert isinstance(config, SmolLm3Config)
        return super().rotary(config, index) if config.rotated[index] else None


FAMILY = SmolLm3()
