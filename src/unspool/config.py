"""What a model is and how an engine runs it: frozen; resolving returns a new one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from unspool.errors import RequestError

RopeStyle = Literal["interleaved", "half"]
# clamped_swiglu joins a gate, at most 7, with a factor between -7 and 7: gate · sigmoid(1.702 · gate) · (factor + 1)
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "clamped_swiglu"]


@dataclass(frozen=True)
class RopeScaling:
    """How positions beyond the trained context are squeezed into the trained rotation speeds."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a model that most families have. A family that has more adds them in a subclass in its file."""

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
    rope_theta: float
    rope_style: RopeStyle  # GGUF's llama stores q and k permuted for "interleaved"; Hugging Face for "half"
    rope_dim: int  # rotated channels of each head; head_dim unless partial
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    activation: Activation = "silu"
    sliding_window: int | None = None  # keys that a query may look back on, itself included
    sliding_layers: tuple[bool, ...] | None = None  # which layers have the window; None: all

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees; None: all."""
        slides = self.sliding_layers is None or self.sliding_layers[layer]
        return self.sliding_window if slides else None


# A CPU computes some hundred tokens in the time that a stream may stand still, a GPU thousands; and its copy engine
# takes keys from large blocks alone.
SUITED: dict[str, dict[str, int]] = {
    "cpu": {"block_size": 32, "step_tokens": 512, "chunk_tokens": 128},
    "cuda": {"block_size": 128, "step_tokens": 8192, "chunk_tokens": 2048},
}


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. Every None, and every 0 or auto that stands for what suits the device, is resolved, and
    told, when the engine starts."""

    device: Literal["auto", "cpu", "cuda", "reference"] = "auto"
    threads: int | None = None  # CPU threads; None: the cores this process may use
    isa: Literal["auto", "avx512", "avx2", "plain"] = "auto"  # CPU kernel set
    quantize: Literal["none", "fp8", "int8", "int4"] = "none"  # of weights that a file stores in 16 or 32 bits
    block_size: int = 0  # tokens in one KV block; 0: what suits the device
    kv_tokens: int | None = None  # capacity of the KV cache in tokens; None: from free memory
    kv_dtype: Literal["auto", "q8", "f16", "f32"] = "auto"  # auto: q8 on a CPU, else f16
    gpu_memory: float = 0.9  # the share of a GPU's memory that may be in use, others' and ours, when kv_tokens is None
    step_tokens: int = 0  # tokens computed in one step, over all requests; 0: what suits the device
    chunk_tokens: int = 0  # of which prompts may take, in a step that others stream in; 0: what suits the device
    max_running: int = 256  # requests in one step
    max_waiting: int = 4096  # requests that wait beyond those; one more is a QueueFullError
    prefix_cache: bool = True
    speculate: str | None = None  # "lookup", "model:PATH", "early-exit[:LAYERS]", "auto"; what it gives never differs

    def __post_init__(self) -> None:
        for name in SUITED["cpu"]:
            if getattr(self, name) < 0:
                raise RequestError(
                    f"{name} is {getattr(self, name)}; it must be at least 1, or 0 for what suits the device", name
                )
        for name in ("max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be at least 1", name)
        if not 0 < self.gpu_memory <= 1:
            raise RequestError(f"gpu_memory is {self.gpu_memory}; it must be above 0 and at most 1", "gpu_memory")
        for name in ("threads", "kv_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1", name)

    def suited(self, body: str) -> EngineConfig:
        """The same, with what suits a body of `ops` wherever nothing was said."""
        suiting = SUITED.get(body, SUITED["cpu"])
        changes: dict[str, Any] = {name: value for name, value in suiting.items() if getattr(self, name) == 0}
        if self.kv_dtype == "auto":
            changes["kv_dtype"] = "q8" if body == "cpu" else "f16"
        return replace(self, **changes)
