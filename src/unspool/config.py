"""Configurations of a model and of an engine: frozen; resolving returns a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, get_args

from unspool.drafter import Drafter
from unspool.errors import RequestError
from unspool.params import checks
from unspool.records import record

RopeStyle = Literal["interleaved", "half"]
# clamped_swiglu combines a gate, at most 7, with a factor between -7 and 7: gate · sigmoid(1.702 · gate) · (factor + 1)
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "clamped_swiglu"]
Device = Literal["auto", "cpu", "cuda", "reference"]
Isa = Literal["auto", "avx512", "avx2", "plain"]
Quantize = Literal["none", "fp8", "int8", "int4"]
KVDtype = Literal["auto", "q8", "f16", "f32"]
SPECULATE = "lookup, model:PATH, early-exit[:LAYERS], mtp, auto"
NO_OVERRIDES = ((), None, None, None, None)


@record(frozen=True)
class RopeScaling:
    """How rotation speeds are scaled for positions beyond the trained context."""

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float  # for longrope: the model's context divided by the original one
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn and longrope; None: `usual_attention_factor`
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole channel pairs
    short_factors: tuple[float, ...] = ()  # longrope: divisors of the speeds for the original context
    long_factors: tuple[float, ...] = ()  # longrope: for a longer context


@record(frozen=True)
class ModelConfig:
    """The numbers that most families of models have. A family with more has a subclass in its file."""

    architecture: str  # the family: "llama", "mistral", "qwen2", …
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float = 10_000.0
    rope_style: RopeStyle = "half"  # GGUF's llama stores q and k permuted for "interleaved"; Hugging Face for "half"
    rope_dim: int = 0  # rotated channels of each head: head_dim, fewer, or 0 for none
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    activation: Activation = "silu"
    qkv_bias: bool = False  # q, k and v have biases
    output_bias: bool = False  # attention's output projection has a bias
    mlp_bias: bool = False  # all of a feed-forward's projections have biases
    sliding_window: int | None = None  # keys that a query attends to, including its own
    sliding_layers: tuple[bool, ...] | None = None  # which layers have the window; None: all

    @property
    def identity(self) -> str:
        """Every number that differs from its default, by name, so that a new field with a default does not change
        it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = {field.name for field in fields(self) if values[field.name] != field.default}
        return repr(sorted((name, value) for name, value in values.items() if name in changed))

    def window(self, layer: int) -> int | None:
        """The number of keys that a query of this layer attends to; None: all."""
        slides = self.sliding_layers is None or self.sliding_layers[layer]
        return self.sliding_window if slides else None


# In the time that a stream may pause, a CPU computes a few hundred tokens and a GPU thousands. The GPU's copy engine
# needs large blocks.
DEVICE_DEFAULTS: dict[str, dict[str, int]] = {
    "cpu": {"block_size": 32, "step_tokens": 512, "chunk_tokens": 128},
    "cuda": {"block_size": 128, "step_tokens": 8192, "chunk_tokens": 2048},
}


@record(frozen=True)
class EngineConfig:
    """How an engine runs. At its start, every None, and every 0 or auto that means the device's default, is resolved
    and reported."""

    device: Device = "auto"
    threads: int | None = None  # CPU threads; None: the cores this process may use
    isa: Isa = "auto"  # CPU kernel set
    quantize: Quantize = "none"  # for weights that a file stores in 16 or 32 bits
    block_size: int = 0  # tokens in one KV block; 0: the device's default
    kv_tokens: int | None = None  # capacity of the KV cache, rounded up to whole blocks; None: from free memory
    kv_dtype: KVDtype = "auto"  # auto: q8 on a CPU, else f16
    state_bytes: int | None = None  # for states of recurrent layers and snapshots of them; None: from free memory
    gpu_memory: float = 0.9  # the share of a GPU's memory that all processes may use, if kv_tokens is None
    step_tokens: int = 0  # tokens computed in one step, over all requests; 0: the device's default
    chunk_tokens: int = 0  # step_tokens' part for prompts while others stream; 0: the device's default
    max_running: int = 256  # requests in one step
    max_waiting: int = 4096  # waiting requests; one more raises a QueueFullError
    prefix_cache: bool = True
    # "lookup", "model:PATH", "early-exit[:LAYERS]", "mtp", "auto", or the caller's own drafter; answers do not
    # depend on it.
    speculate: str | Drafter | None = None
    # Overrides of the model's own files.
    chat_template: str | None = None  # a template, or the path of a file with one
    rope_scaling: str | Mapping[str, Any] | None = None  # "yarn:4", "none", or Hugging Face's JSON object
    rope_theta: float | None = None
    max_model_len: int | None = None  # tokens of a prompt and its answer, at most the model's own context
    override_kv: Sequence[str] | Mapping[str, Any] = ()  # GGUF's keys, as KEY=TYPE:VALUE

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            checks.word(name, getattr(self, name), words)
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in ("threads", "kv_tokens", "state_bytes", "max_model_len"):
                object.__setattr__(self, name, checks.integer(name, value, low, high))
        checks.number("gpu_memory", self.gpu_memory, 0, 1, above=True)
        checks.flag("prefix_cache", self.prefix_cache)
        self._check_overrides()
        if self.kv_tokens is not None and self.kv_tokens < self.block_size:
            raise RequestError(
                f"kv_tokens is {self.kv_tokens:,}; allowed: at least one block, which is {self.block_size:,} tokens "
                "(block_size)",
                "kv_tokens",
            )
        if isinstance(self.speculate, str):
            _check_speculate(self.speculate)
        elif self.speculate is not None and not isinstance(self.speculate, Drafter):
            raise checks.refuse("speculate", self.speculate, f"{SPECULATE}, or an object with a drafter's methods")

    def _check_overrides(self) -> None:
        if self.rope_scaling is not None or self.override_kv != ():
            from unspool import overrides

            object.__setattr__(self, "override_kv", overrides.kv_overrides(self.override_kv))
            if self.rope_scaling is not None:
                object.__setattr__(self, "rope_scaling", overrides.rope_scaling(self.rope_scaling))
        if self.rope_theta is not None:
            object.__setattr__(self, "rope_theta", checks.number("rope_theta", self.rope_theta, 1, 1e12))
        if self.chat_template is not None and (not isinstance(self.chat_template, str) or not self.chat_template):
            raise checks.refuse("chat_template", self.chat_template, "a template, or the path of a file that holds one")

    def context_of(self, model_context: int) -> int:
        """The context for a model with this context of its own."""
        return model_context if self.max_model_len is None else min(model_context, self.max_model_len)

    def with_device_defaults(self, backend: str) -> EngineConfig:
        """A copy with a backend's defaults wherever the caller gave no value."""
        defaults = DEVICE_DEFAULTS.get(backend, DEVICE_DEFAULTS["cpu"])
        changes: dict[str, Any] = {name: value for name, value in defaults.items() if getattr(self, name) == 0}
        if self.kv_dtype == "auto":
            changes["kv_dtype"] = "q8" if backend == "cpu" else "f16"
        return replace(self, **changes)


_WORDS: dict[str, tuple[str, ...]] = {
    "device": get_args(Device),
    "isa": get_args(Isa),
    "quantize": get_args(Quantize),
    "kv_dtype": get_args(KVDtype),
}
_INTEGERS = {  # the least and the most, far above what any machine has
    "threads": (1, 4096),
    "kv_tokens": (1, 2**40),
    "state_bytes": (1, 2**60),
    "block_size": (0, 65_536),
    "step_tokens": (0, 2**24),
    "chunk_tokens": (0, 2**24),
    "max_running": (1, 2**20),
    "max_waiting": (1, 2**31 - 1),
    "max_model_len": (2, 2**31 - 1),
}


def overrides_of(config: EngineConfig) -> tuple[Any, ...]:
    """The options that replace values of the model's own files; NO_OVERRIDES where none is set."""
    return config.override_kv, config.rope_theta, config.rope_scaling, config.max_model_len, config.chat_template


def _check_speculate(how: str) -> None:
    kind, _, detail = how.partition(":")
    is_good = (
        how in ("lookup", "auto", "early-exit", "mtp")
        or (kind == "model" and bool(detail))
        or (kind == "early-exit" and detail.isdecimal())
    )
    if not is_good:
        raise checks.refuse("speculate", how, SPECULATE)
