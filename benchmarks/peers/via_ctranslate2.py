"""CTranslate2 with 8-bit weights, converted from float32 by its own writer: `python via_ctranslate2.py SOURCE TARGET`.

SOURCE is the folder that `benchmarks.export` writes. CTranslate2 has no tokenizer: the token of id 7 is named "7".
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2 as api
import numpy as np


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        threads = {"inter_threads": 1, "intra_threads": options["threads"]}
        self._generator = api.Generator(options["model"], device="cpu", compute_type="int8", **threads)
        self.version = f"ctranslate2 {api.__version__}"

    def first(self, text: str, ids: list[int]) -> None:
        self.prefill(ids)

    def prefill(self, prompt: list[int]) -> float:
        return self._generate([prompt], 1)[0]

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        times = self._generate(prompts, 1 + steps)
        return times[-1] - times[len(prompts) - 1]

    def _generate(self, prompts: list[list[int]], count: int) -> list[float]:
        """Seconds until each token came."""
        began = time.perf_counter()
        times: list[float] = []

        def note(_: Any) -> bool:
            times.append(time.perf_counter() - began)
            return False  # go on

        named = [[str(token) for token in prompt] for prompt in prompts]
        limits = {"min_length": count, "max_length": count}
        self._generator.generate_batch(named, sampling_topk=1, include_prompt_in_result=False, callback=note, **limits)
        if len(times) != count * len(prompts):
            raise RuntimeError(f"asked for {count} tokens of {len(prompts)} prompts, got {len(times)}")
        return times


def convert(source: Path, target: Path) -> None:
    specs = api.specs
    config = json.loads((source / "config.json").read_text())
    weights = np.load(source / "weights.npz")
    spec = specs.TransformerDecoderModelSpec.from_config(
        config["num_layers"],
        config["num_heads"],
        activation=specs.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=config["rope_style"] == "interleaved",
        rotary_base=config["rope_theta"],
        num_heads_kv=config["num_kv_heads"],
        head_dim=config["head_dim"],
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["token_embd.weight"]
    decoder.projection.weight = weights["token_embd.weight" if config["tied_embeddings"] else "output.weight"]
    decoder.layer_norm.gamma = weights["output_norm.weight"]
    for number, layer in enumerate(decoder.layer):
        _fill(layer, {name.split(".", 2)[2]: name for name in weights if name.startswith(f"blk.{number}.")}, weights)
    spec.register_vocabulary([str(token) for token in range(config["vocab_size"])])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.config.layer_norm_epsilon = config["norm_eps"]
    spec.validate()
    spec.optimize(quantization="int8")
    target.mkdir(parents=True, exist_ok=True)
    spec.save(str(target))


def _fill(layer: Any, names: dict[str, str], weights: Any) -> None:
    def weight(name: str) -> np.ndarray:
        array: np.ndarray = weights[names[f"{name}.weight"]]
        return array

    attention, inner = layer.self_attention, layer.ffn
    attention.layer_norm.gamma, inner.layer_norm.gamma = weight("attn_norm"), weight("ffn_norm")
    attention.linear[0].weight = np.concatenate([weight(f"attn_{part}") for part in "qkv"])
    if "attn_q.bias" in names:
        attention.linear[0].bias = np.concatenate([weights[names[f"attn_{part}.bias"]] for part in "qkv"])
    attention.linear[1].weight = weight("attn_output")
    inner.linear_0.weight, inner.linear_0_noact.weight = weight("ffn_gate"), weight("ffn_up")
    inner.linear_1.weight = weight("ffn_down")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
