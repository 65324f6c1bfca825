"""From a file or a directory to a Checkpoint: config, names and defaults; what cannot be honoured is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unspool.config import ModelConfig, RopeScaling
from unspool.errors import ModelError
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.expert_config import ExpertConfig
from unspool.models.quantize import quantize
from unspool.models.random import SHAPES, byte_vocabulary, random_checkpoint, write_random_gguf
from unspool.models.registry import GGUF, build, family_of, gguf_name, metadata_of, tensor_shapes
from unspool.ops.reference import ReferenceOps
from unspool.weights.gguf import write_gguf
from unspool.weights.safetensors import write_safetensors
from unspool.weights.weight import Weight, encode_weight

GGUF_SHAPES = [name for name in SHAPES if name.startswith("tiny") and name != "tiny-mistral"]
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
           "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}  # fmt: skip


def config_json(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": [CLASSES[config.architecture]],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "sliding_window": config.sliding_window,
        "eos_token_id": 2,
    }
    if config.architecture == "gemma3":
        values |= {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": config.head_dim,
                   "sliding_window_pattern": 3, "rope_local_base_freq": 10_000.0}  # fmt: skip
    return {name: value for name, value in (values | changes).items() if value != "absent"}


def has_experts(shape: str) -> bool:
    return isinstance(SHAPES[shape], ExpertConfig)


def write_directory(path: Path, checkpoint: Checkpoint, **changes: Any) -> Path:
    """The checkpoint as a Hugging Face directory: its names, and Gemma's norms less one."""
    config = checkpoint.config
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_json(config, **changes)))
    family = family_of(config.architecture)
    whole, in_layer = ({v: k for k, v in names.items()} for names in (family.whole_names, family.layer_names))
    tensors = {}
    for name, weight in checkpoint.weights.items():
        if name in whole:
            theirs = whole[name]
        else:
            _, layer, rest = name.split(".", 2)
            theirs = f"model.layers.{layer}.{in_layer[rest]}"
        if config.architecture == "gemma3" and "norm" in name:
            weight = encode_weight(name, weight.dequantize() - 1)
        tensors[theirs] = weight
    write_safetensors(path / "model.safetensors", tensors)
    return path


@pytest.mark.parametrize("shape", GGUF_SHAPES)
def test_a_gguf_file_is_the_model_that_was_written(tmp_path: Path, shape: str) -> None:
    write_random_gguf(tmp_path / "m.gguf", SHAPES[shape], format="f16", seed=3)
    expected = random_checkpoint(SHAPES[shape], format="f16", seed=3)
    found = open_checkpoint(tmp_path / "m.gguf")
    own, opened_as = expected.config.architecture, found.config.architecture  # some families share a GGUF name
    assert opened_as in (own, GGUF[gguf_name(own)])
    assert replace(found.config, architecture=own) == expected.config
    if opened_as == own:
        assert found.fingerprint == expected.fingerprint
    assert (found.name, found.eos_ids, found.chat_template, found.generation) == ("m", (256,), None, {})
    assert shapes(found.weights) == tensor_shapes(found.config)


@pytest.mark.parametrize("shape", [name for name in SHAPES if "tiny" in name and SHAPES[name].architecture in CLASSES])
def test_a_directory_is_the_model_that_was_written(tmp_path: Path, shape: str) -> None:
    expected = random_checkpoint(replace(SHAPES[shape], rope_style="half"))
    found = open_checkpoint(write_directory(tmp_path / "model", expected))
    assert found.config == expected.config
    assert found.name == "model"
    assert found.eos_ids == (2,)
    assert shapes(found.weights) == tensor_shapes(found.config)
    for name, weight in found.weights.items():
        np.testing.assert_allclose(weight.dequantize(), expected.weights[name].dequantize(), rtol=0, atol=1e-6)


def test_bytes_are_not_copied_at_load(tmp_path: Path) -> None:
    write_random_gguf(tmp_path / "m.gguf", SHAPES["tiny"])
    directory = write_directory(tmp_path / "d", random_checkpoint(replace(SHAPES["tiny"], rope_style="half")))
    for path in (tmp_path / "m.gguf", directory):
        assert not any(weight.data.flags.owndata for weight in open_checkpoint(path).weights.values())


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", 8.0),
        RopeScaling("yarn", 4.0, original_context=128, beta_fast=16.0, beta_slow=2.0),
        RopeScaling("yarn", 4.0, original_context=128, attention_factor=1.0),
    ],
)
def test_rope_scaling_in_gguf(tmp_path: Path, scaling: RopeScaling) -> None:
    config = replace(SHAPES["tiny-qwen3"], rope_scaling=scaling)
    write_random_gguf(tmp_path / "m.gguf", config)
    found = open_checkpoint(tmp_path / "m.gguf").config
    assert found.rope_scaling is not None
    if scaling.attention_factor is not None:
        assert found.rope_scaling.attention_factor == pytest.approx(scaling.attention_factor)
        found = replace(found, rope_scaling=replace(found.rope_scaling, attention_factor=scaling.attention_factor))
    assert found == config


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3_SCALING = RopeScaling("llama3", 8.0, original_context=128)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_scaling": None}, 10_000.0, None),
        ({"rope_scaling": {"rope_type": "default"}}, 10_000.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10_000.0, RopeScaling("linear", 2.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 10_000.0, LLAMA3_SCALING),
        ({"rope_theta": "absent", "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, 5e5,
         LLAMA3_SCALING),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, 10_000.0,
         RopeScaling("yarn", 4.0, original_context=128)),
    ],
)  # fmt: skip
def test_rope_in_config_json(tmp_path: Path, changes: Any, theta: float, scaling: RopeScaling | None) -> None:
    checkpoint = random_checkpoint(replace(SHAPES["tiny"], rope_style="half"))
    found = open_checkpoint(write_directory(tmp_path / "m", checkpoint, **changes)).config
    assert (found.rope_theta, found.rope_scaling) == (theta, scaling)


def test_gemma_with_new_style_fields(tmp_path: Path) -> None:
    config = SHAPES["tiny-gemma3"]
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    changes = {"layer_types": kinds, "rope_parameters": parameters, "query_pre_attn_scalar": 64}
    found = open_checkpoint(write_directory(tmp_path / "m", random_checkpoint(config), **changes)).config
    assert (found.rope_theta, found.rope_theta_local) == (5e5, 2e4)
    assert found.rope_scaling == RopeScaling("linear", 8.0)
    assert found.attention_scale == 1 / math.sqrt(64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MyForCausalLM"]}, "architectures: 'MyForCausalLM' is not supported; supported: Llama"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "'DeepseekV4ForCausalLM' is not supported: it has hyper-conn"),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3}, "text_config: 3 is not an object"),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "bert"}},
         "text_config.model_type: 'bert' is not supported in Mistral3ForConditionalGeneration"),
        ({"architectures": None}, "architectures: one name was expected"),
        ({"attention_bias": 1}, "attention_bias: 1 is not true or false"),
        ({"quantization_config": 4}, "quantization_config: an object was expected"),
        ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: 1000000000 is outside 1 to 1024"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: '2' is not an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: True is not an integer"),
        ({"hidden_size": "absent"}, "hidden_size: it is missing"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({"head_dim": "absent", "num_attention_heads": 6, "num_key_value_heads": 6}, "head_dim: it is missing"),
        ({"head_dim": 15}, "head dimension is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0 is outside"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan is outside"),
        ({"rope_theta": float("inf")}, "rope_theta: inf is outside"),
        ({"rope_scaling": {"rope_type": "random", "factor": 2}}, "rope_scaling.rope_type: .random. is not"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
         "rope_scaling.short_factor: a list of 8 numbers was expected"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [0] * 8}},
         r"rope_scaling.long_factor\[0\]: 0 is outside"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: it is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}}, "must exceed"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "must be at least 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling: 'yarn' is not an object"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0}}, "partial_rotary_factor: 0 is outside"),
        ({"eos_token_id": "end"}, "eos_token_id: 'end' is not a token id"),
    ],
)
def test_config_json_is_honoured_or_refused(tmp_path: Path, changes: Any, message: str) -> None:
    checkpoint = random_checkpoint(replace(SHAPES["tiny"], rope_style="half"))
    path = write_directory(tmp_path / "m", checkpoint, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(path)
    assert "config.json" in str(caught.value)


def test_qwen_slides_from_a_layer_on_and_ignores_an_unused_window(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(SHAPES["tiny-qwen2"])
    path = write_directory(tmp_path / "m", checkpoint, sliding_window=32, use_sliding_window=False)
    assert open_checkpoint(path).config.sliding_window is None
    changes = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    found = open_checkpoint(write_directory(tmp_path / "m", checkpoint, **changes)).config
    assert [found.window(layer) for layer in range(2)] == [None, 32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "my"}, "architecture .my. is not supported; supported: llama, qwen2, "),
        ({"general.architecture": "llama4"}, "'llama4' is not supported: its attention sees chunks of the context; s"),
        ({"general.architecture": 3}, "general.architecture: 3 is not a string"),
        ({"llama.block_count": 0}, "llama.block_count: 0 is outside 1 to 1024"),
        ({"llama.block_count": "2"}, "llama.block_count: '2' is not an integer"),
        ({"llama.embedding_length": None}, "llama.embedding_length: it is missing"),
        ({"llama.attention.head_count": [4, 2]}, r"llama.attention.head_count: \[4, 2\] is not an integer"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length: 8 differs from attention.key_length 16"),
        ({"llama.rope.dimension_count": 18}, "18 channels of each head are rotated"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: 'longrope' is not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor: it is missing"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "llama.expert_used_count: 9 is outside 1 to 8"),
        ({"llama.expert_count": 8}, "llama.expert_used_count: it is missing"),
        ({"tokenizer.ggml.tokens": ["a"]}, "lists 1 tokens; 'token_embd.weight' has 320 rows"),
        ({"tokenizer.ggml.eos_token_id": 320}, "tokenizer.ggml.eos_token_id: 320 is outside 0 to 319"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template: 1 is not a string"),
        ({"tokenizer.chat_template.tool_use": 1}, "tokenizer.chat_template.tool_use: 1 is not a string"),
        ({"general.sampling.temp": "hot"}, "general.sampling.temp: 'hot' is not a number"),
    ],
)
def test_gguf_keys_are_honoured_or_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = SHAPES["tiny"]
    metadata = metadata_of(config) | byte_vocabulary(config.vocab_size) | changes
    metadata = {key: value for key, value in metadata.items() if value is not None}
    write_gguf(tmp_path / "m.gguf", metadata, random_checkpoint(config).weights)
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert "m.gguf" in str(caught.value)


def test_gguf_sampling_defaults(tmp_path: Path) -> None:
    config = SHAPES["tiny"]
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "penalty_repeat": 1.1}
    metadata = metadata_of(config) | {f"general.sampling.{key}": value for key, value in sampling.items()}
    write_gguf(tmp_path / "m.gguf", metadata, random_checkpoint(config).weights)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1}
    found = open_checkpoint(tmp_path / "m.gguf")
    assert (found.generation, found.notes) == (expected, ())


def test_generation_config(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", random_checkpoint(replace(SHAPES["tiny"], rope_style="half")))

    def opened(**values: Any) -> Checkpoint:
        (path / "generation_config.json").write_text(json.dumps(values))
        return open_checkpoint(path)

    found = opened(do_sample=True, temperature=0.7, top_k=20, top_p=0.8, max_new_tokens=2048, eos_token_id=[2, 7])
    assert found.generation == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert found.eos_ids == (2, 7)
    assert opened(do_sample=False, temperature=0.7, top_k=1).generation == {"temperature": 0.0}
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p: 2 is outside 0 to 1"):
        opened(top_p=2)
    size = found.config.vocab_size
    with pytest.raises(ModelError, match=rf"generation_config\.json: eos_token_id: token {size} is outside the voc"):
        opened(eos_token_id=[2, size])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": size}))
    with pytest.raises(ModelError, match=rf"/config\.json: eos_token_id: token {size} is outside the vocabulary"):
        opened()


def test_chat_templates(tmp_path: Path) -> None:
    path = write_directory(tmp_path / "m", random_checkpoint(replace(SHAPES["tiny"], rope_style="half")))
    assert open_checkpoint(path).chat_template is None
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert open_checkpoint(path).chat_template == "yes"
    assert open_checkpoint(path).tool_template is None
    several = [{"name": "default", "template": "yes"}, {"name": "tool_use", "template": "with tools"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert open_checkpoint(path).tool_template == "with tools"
    for wrong in (5, [5], [{"name": [], "template": "x"}], [{"name": "default"}], {"default": "x"}):
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(ModelError, match=r"tokenizer_config.json: chat_template: "):
            open_checkpoint(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert open_checkpoint(path).chat_template == "one"
    (path / "chat_template.jinja").write_text("its own file")
    assert open_checkpoint(path).chat_template == "its own file"
    assert open_checkpoint(path).tool_template is None
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("another file")
    assert open_checkpoint(path).chat_template == "its own file"
    assert open_checkpoint(path).tool_template == "another file"
    (path / "chat_template.jinja").write_text("x" * (1 << 21))
    with pytest.raises(ModelError, match="a chat template of 2097152 characters"):
        open_checkpoint(path)


def test_a_tied_head_and_old_tables_are_left_out(tmp_path: Path) -> None:
    config = replace(SHAPES["tiny"], rope_style="half")
    untied = random_checkpoint(replace(config, tied_embeddings=False))
    path = write_directory(tmp_path / "m", untied, tie_word_embeddings=True)
    assert shapes(open_checkpoint(path).weights) == tensor_shapes(config)


def shapes(weights: Mapping[str, Weight]) -> dict[str, tuple[int, ...]]:
    return {name: weight.shape for name, weight in weights.items()}


def test_every_tensor_must_have_its_place() -> None:
    found = random_checkpoint(SHAPES["tiny"])
    extra = encode_weight("a", np.zeros((2, 3), np.float32))
    wrong = encode_weight("output_norm.weight", np.zeros(3, np.float32))
    missing = {name: weight for name, weight in found.weights.items() if name != "output_norm.weight"}
    for weights, message in [
        (missing, r"tensor output_norm\.weight is missing"),
        ({**found.weights, wrong.name: wrong}, r"tensor output_norm\.weight has shape \[3\]; the model needs \["),
        ({**found.weights, "a": extra}, "tensor a has no place in this architecture"),
    ]:
        with pytest.raises(ModelError, match=message):
            build(found.config, weights, ReferenceOps())


def test_the_fingerprint_is_the_same_from_a_file_and_from_memory(tmp_path: Path) -> None:
    write_random_gguf(tmp_path / "m.gguf", SHAPES["tiny"], format="q8_0")
    found = open_checkpoint(tmp_path / "m.gguf")
    copies = {
        name: Weight(name, weight.format, weight.shape, weight.data.copy()) for name, weight in found.weights.items()
    }
    assert any(weight.nbytes > 4096 for weight in copies.values()), "samples were read"
    assert replace(found, weights=copies).fingerprint == found.fingerprint


def test_the_fingerprint_tells_models_apart() -> None:
    tiny = random_checkpoint(SHAPES["tiny"])
    prints = {
        tiny.fingerprint,
        random_checkpoint(SHAPES["tiny"], seed=1).fingerprint,
        random_checkpoint(SHAPES["tiny"], format="f16").fingerprint,
        random_checkpoint(replace(SHAPES["tiny"], rope_theta=1e5)).fingerprint,
    }
    assert len(prints) == 4
    assert random_checkpoint(SHAPES["tiny"]).fingerprint == tiny.fingerprint


def test_large_random_matrices_have_no_equal_rows() -> None:
    config = replace(SHAPES["tiny"], vocab_size=70_000, num_layers=1)
    for format in ("bf16", "q8_0"):
        embedding = random_checkpoint(config, format=format).weights["token_embd.weight"]
        rows = embedding.data.reshape(70_000, -1)
        assert len(np.unique(rows, axis=0)) == 70_000
        assert 0.2 < float(embedding.dequantize_rows(np.arange(1000)).std()) < 0.3  # 2 / sqrt(64)


def test_quantize_keeps_vectors_and_narrow_matrices() -> None:
    tiny = quantize(random_checkpoint(SHAPES["tiny"]), "q4_0")
    assert tiny.weights["blk.0.attn_q.weight"].format == "q4_0"
    assert tiny.weights["blk.0.attn_norm.weight"].format == "f32"
    assert quantize(tiny, "q4_k").weights["blk.0.attn_q.weight"].format == "q4_0"
    with pytest.raises(ModelError, match="unknown format 'q9'"):
        quantize(tiny, "q9")


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match=r"did you mean .*a\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        open_checkpoint(tmp_path)


def test_defaults_beside_a_gguf_file_are_the_models(tmp_path) -> None:
    from unspool.models.random import SHAPES, write_random_gguf

    write_random_gguf(tmp_path / "m.gguf", SHAPES["tiny"])
    (tmp_path / "m.generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9, "no_repeat_ngram_size": 3}')
    expected = {"temperature": 0.2, "top_p": 0.9, "no_repeat_ngram": 3}
    found = open_checkpoint(tmp_path / "m.gguf")
    assert (found.generation, found.notes) == (expected, ())
    (tmp_path / "m.generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"m\.generation_config\.json"):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_models_identity_is_what_differs_from_the_defaults() -> None:
    tiny = SHAPES["tiny"]
    assert "('num_layers', 2)" in tiny.identity
    assert "mlp_bias" not in tiny.identity, "a field that is added later changes no fingerprint"
    assert replace(tiny, mlp_bias=True).identity != tiny.identity


def test_gguf_chat_templates(tmp_path: Path) -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    config = SHAPES["tiny"]
    write_gguf(tmp_path / "m.gguf", metadata_of(config) | templates, random_checkpoint(config).weights)
    found = open_checkpoint(tmp_path / "m.gguf")
    assert (found.chat_template, found.tool_template) == ("plain", "tools")
