"""ONNX Runtime GenAI with 4-bit weights from its own model builder: `python via_onnxruntime.py SOURCE TARGET`.

SOURCE is the folder that `benchmarks.export` writes; it becomes a Hugging Face directory, which the builder reads.
Quantizing again loses quality: what runs here is a worse model, and a speed to compare with.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        import onnxruntime_genai as api

        self._api = api
        config = api.Config(options["model"])
        threads = {"session_options": {"intra_op_num_threads": options["threads"]}}
        config.overlay(json.dumps({"model": {"decoder": threads}}))
        self._model = api.Model(config)
        self.version = f"onnxruntime-genai {api.__version__}"

    def first(self, text: str, ids: list[int]) -> None:
        self.prefill(ids)

    def prefill(self, prompt: list[int]) -> float:
        began = time.perf_counter()
        self._begin([prompt], 1)
        return time.perf_counter() - began

    def decode(self, prompts: list[list[int]], steps: int) -> float:
        generator = self._begin(prompts, 1 + steps)
        began = time.perf_counter()
        for _ in range(steps):
            generator.generate_next_token()
        return time.perf_counter() - began

    def _begin(self, prompts: list[list[int]], count: int) -> Any:
        """A generator that has the first token of each prompt."""
        params, length = self._api.GeneratorParams(self._model), len(prompts[0]) + count
        params.set_search_options(max_length=length, min_length=length, batch_size=len(prompts), do_sample=False)
        generator = self._api.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        return generator


def convert(source: Path, target: Path) -> None:
    with TemporaryDirectory() as folder:
        write_hugging_face(source, Path(folder))
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", folder, "-i", folder]
        options = ["-p", "int4", "-e", "cpu", "-c", f"{folder}/cache", "--extra_options", "int4_accuracy_level=4"]
        subprocess.run([*builder, "-o", str(target), *options], check=True)


def write_hugging_face(source: Path, folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    shape = json.loads((source / "config.json").read_text())
    config = transformers.AutoConfig.for_model(
        shape["architecture"],
        architectures=[FAMILIES[shape["architecture"]]],
        num_hidden_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["context_length"],
        rms_norm_eps=shape["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        tie_word_embeddings=shape["tied_embeddings"],
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with np.load(source / "weights.npz") as arrays:
        state = {hugging_face_name(n): torch.from_numpy(hugging_face_rows(n, a, shape)) for n, a in arrays.items()}
    lacking = model.load_state_dict(state, strict=False)
    if lacking.unexpected_keys or set(lacking.missing_keys) - {"lm_head.weight"}:
        raise ValueError(f"the tensors do not fit {FAMILIES[shape['architecture']]}: {lacking}")
    model.save_pretrained(folder)
    words = {str(token): token for token in range(shape["vocab_size"])}  # the builder wants a tokenizer, any
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0").save_pretrained(folder)


def hugging_face_name(name: str) -> str:
    if name.startswith("blk."):
        _, number, module, kind = name.split(".")
        return f"model.layers.{number}.{MODULES[module]}.{kind}"
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    module, kind = name.split(".")
    return f"{whole[module]}.{kind}"


def hugging_face_rows(name: str, array: np.ndarray, shape: dict[str, Any]) -> np.ndarray:
    """GGUF's llama interleaves the channels that rotate together; Hugging Face has them in halves."""
    heads = {"attn_q": shape["num_heads"], "attn_k": shape["num_kv_heads"]}.get(name.split(".")[-2])
    if heads is None or shape["rope_style"] != "interleaved":
        return array
    pairs = array.reshape(heads, shape["head_dim"] // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
