"""unspool plan: what a model needs and how fast it can be, from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unspool.cli import flags
from unspool.cli.parser import Parser

if TYPE_CHECKING:
    from unspool.bench.bandwidth import Bandwidth
    from unspool.config import EngineConfig
    from unspool.weights.checkpoint import Checkpoint

DESCRIPTION = """\
What a model needs and how fast it can be, before it is loaded: only its headers are read. The decode floor is what
every engine has to obey: to make one token, all weights have to come through memory once."""
EXAMPLE_TOKENS = 1024  # of a modest request


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, times in seconds."""

    model: str
    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    parameters: int
    weight_bytes: int
    weight_formats: dict[str, int]  # bytes in each format
    step_bytes: int  # read once a step: all but the embedding table, of which a step reads a row a token
    kv_dtype: str
    kv_bytes_per_token: float
    kv_tokens: int
    kv_bytes: float
    free_bytes: int
    requests: dict[int, int]  # tokens of a request, its answer included -> how many fit at once

    @property
    def fits(self) -> bool:
        return self.weight_bytes + self.kv_bytes <= self.free_bytes


def make_plan(checkpoint: Checkpoint, config: EngineConfig) -> Plan:
    import math

    from unspool.engine.sizing import free_memory, kv_bytes_per_token, num_kv_blocks

    model, weights = checkpoint.config, checkpoint.weights
    formats: Counter[str] = Counter()
    for weight in weights.values():
        formats[weight.format] += weight.nbytes
    idle = 0 if model.tied_embeddings else weights["token_embd.weight"].nbytes if "token_embd.weight" in weights else 0
    per_token = kv_bytes_per_token(model, config.kv_dtype)
    num_blocks = num_kv_blocks(model, config)
    lengths = sorted({min(EXAMPLE_TOKENS, model.context_length), model.context_length})
    return Plan(
        model=checkpoint.name,
        architecture=model.architecture,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        context_length=model.context_length,
        parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        weight_bytes=formats.total(),
        weight_formats=dict(formats.most_common()),
        step_bytes=formats.total() - idle,
        kv_dtype=config.kv_dtype,
        kv_bytes_per_token=per_token,
        kv_tokens=num_blocks * config.block_size,
        kv_bytes=num_blocks * config.block_size * per_token,
        free_bytes=free_memory(),
        requests={length: num_blocks // -(-length // config.block_size) for length in lengths},
    )


def main(argv: Sequence[str]) -> int:
    parser = Parser("plan", "[MODEL] [options]", DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help="as for run's -m (smollm2)")
    parser.add_argument("--json", action="store_true", help="one object, sizes in bytes and times in seconds")
    parser.add_argument("--kv-tokens", dest="engine.kv_tokens", type=int, metavar="N", help="KV cache for N tokens")
    parser.add_argument("--kv-dtype", dest="engine.kv_dtype", metavar="TYPE", help="KV cache in f16, q8 or f32 (f16)")
    parser.add_argument("--threads", dest="engine.threads", type=int, metavar="N", help="threads that read memory")
    parser.add_common()
    namespace = parser.parse_args(argv)
    options = flags.engine_options(namespace)

    from unspool.bench.bandwidth import measure
    from unspool.cli.loading import locate
    from unspool.llm import make_config
    from unspool.weights.checkpoint import open_checkpoint

    config = make_config(options)
    config = config.suited(config.device)
    plan = make_plan(open_checkpoint(locate(namespace.model)), config)
    bandwidth = measure(config.threads)
    if namespace.json:
        import json

        print(json.dumps(as_object(plan, bandwidth)))
    else:
        print(describe(plan, bandwidth))
    return 0


def as_object(plan: Plan, bandwidth: Bandwidth) -> dict[str, Any]:
    floor = plan.step_bytes / bandwidth.bytes_per_second
    full = floor + plan.context_length * plan.kv_bytes_per_token / bandwidth.bytes_per_second
    return asdict(plan) | {
        "fits": plan.fits,
        "bandwidth": asdict(bandwidth) | {"how": bandwidth.how},
        "decode_floor": {"seconds_per_token": floor, "tokens_per_second": 1 / floor, "at_full_context": full},
    }


def describe(plan: Plan, bandwidth: Bandwidth) -> str:
    from unspool.cli.terminal import human_bytes as size

    told = as_object(plan, bandwidth)["decode_floor"]
    bits = 8 * plan.weight_bytes / plan.parameters
    formats = ", ".join(f"{name} {size(count)}" for name, count in plan.weight_formats.items())
    each = {"f32": "4", "f16": "2", "q8": "1, and 4 for the scale of each head"}[plan.kv_dtype]
    factors = f"2 · {plan.num_layers} layers · {plan.num_kv_heads} KV heads · {plan.head_dim} · {each} bytes"
    fitting = ", or ".join(f"{count:,} of {length:,} tokens" for length, count in plan.requests.items())
    whole = f"{size(plan.weight_bytes + plan.kv_bytes)} for weights and a full cache"
    verdict = "" if plan.fits else ": they do not fit together"
    lines = [
        f"{plan.model}: {plan.architecture}, {plan.num_layers} layers, context {plan.context_length:,}",
        f"weights       {size(plan.weight_bytes)}: {plan.parameters:,} parameters of {bits:.1f} bits ({formats})",
        f"KV cache      {plan.kv_bytes_per_token:,.0f} bytes a token = {factors}",
        f"              room for {plan.kv_tokens:,} tokens, {size(plan.kv_bytes)} when full, taken as it is used",
        f"requests      at once: {fitting}",
        f"memory        {size(plan.free_bytes)} free, {whole}{verdict}",
        f"bandwidth     {bandwidth.bytes_per_second / 1e9:.1f} GB/s measured ({bandwidth.how})",
        f"decode floor  {1000 * told['seconds_per_token']:.2f} ms a token, {told['tokens_per_second']:,.0f} tokens/s: "
        f"{size(plan.step_bytes)} read each step; {1000 * told['at_full_context']:.2f} ms with a full context",
    ]
    return "\n".join(lines)
