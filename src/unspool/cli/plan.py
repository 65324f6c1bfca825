"""unspool plan: what a model needs and how fast it can be, from its headers alone."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unspool.cli import flags
from unspool.cli.parser import Parser

if TYPE_CHECKING:
    from argparse import Namespace

    from unspool.config import EngineConfig
    from unspool.machine import Bandwidth
    from unspool.models.checkpoint import Checkpoint
    from unspool.weights.weight import Weight

DESCRIPTION = """\
What a model needs and how fast it can be, before it is loaded: only its headers are read. The decode floor is what
every engine has to obey: to make one token, all weights have to come through memory once."""
EXAMPLE_TOKENS = 1024  # of a modest request


@dataclass(frozen=True)
class KvLayers:
    """Layers that keep keys and values of the same sizes."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    def describe(self, kv_dtype: str) -> str:
        from unspool.engine.sizing import integer_key_bytes

        factors = f"{self.num_layers} layers · {self.num_kv_heads} KV heads"
        if kv_dtype == "q8":
            key = integer_key_bytes(self.key_dim)
            return f"{factors} · (a key of {key}, a value of {self.value_dim}, 4 for the scale of each)"
        size = 4 if kv_dtype == "f32" else 2
        if self.key_dim == self.value_dim:
            return f"2 · {factors} · {self.key_dim} · {size} bytes"
        return f"{factors} · ({self.key_dim} + {self.value_dim}) · {size} bytes"


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, times in seconds."""

    model: str
    architecture: str
    num_layers: int
    kv_layers: list[KvLayers]
    context_length: int
    parameters: int
    weight_bytes: int
    weight_formats: dict[str, int]  # bytes in each format
    step_bytes: int  # read once a step: all but the embedding table, of which a step reads a row a token
    kv_dtype: str
    kv_bytes_per_token: int
    kv_tokens: int
    kv_bytes: float
    free_bytes: int
    device: str
    workspace_bytes: int  # of a device with memory of its own: what a step needs beside weights and cache
    requests: dict[int, int]  # tokens of a request, its answer included -> how many fit at once
    problem: str | None = None  # why a GPU has no room for a cache

    @property
    def fits(self) -> bool:
        return self.problem is None and self.weight_bytes + self.workspace_bytes + self.kv_bytes <= self.free_bytes


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory in bytes, and how fast it is read where that is known."""

    name: str
    total: int
    free: int
    bytes_per_second: float | None = None
    how: str = ""


def make_plan(checkpoint: Checkpoint, config: EngineConfig, gpu: Gpu | None = None) -> Plan:
    import math

    from unspool.engine.sizing import kv_bytes_per_token, num_kv_blocks
    from unspool.errors import BackendError
    from unspool.machine import free_memory
    from unspool.models.registry import architecture_of

    model, weights = checkpoint.config, checkpoint.weights
    architecture = architecture_of(model)
    caches = [layer.kv for layer in architecture.storage if layer.kv is not None]
    kept = Counter((kv.num_heads, kv.key_dim, kv.value_dim) for kv in caches)
    formats: Counter[str] = Counter()
    for weight in weights.values():
        name, nbytes = _held(weight, gpu)
        formats[name] += nbytes
    is_idle = not model.tied_embeddings and "token_embd.weight" in weights
    idle = weights["token_embd.weight"] if is_idle else None
    per_token = kv_bytes_per_token(architecture.storage, config.kv_dtype)
    room = workspace = problem = None
    if gpu is not None:
        from unspool.ops.cuda import memory

        workspace = memory.workspace_bytes(architecture.widths, config)
        if config.kv_tokens is None:
            try:
                room = memory.kv_room(gpu.free - formats.total(), gpu.total, architecture.widths, config)
            except BackendError as error:
                problem = str(error)
    num_blocks = num_kv_blocks(architecture.storage, model.context_length, config, room) if problem is None else 0
    lengths = sorted({min(EXAMPLE_TOKENS, model.context_length), model.context_length})
    return Plan(
        model=checkpoint.name,
        architecture=model.architecture,
        num_layers=model.num_layers,
        kv_layers=[KvLayers(count, *sizes) for sizes, count in kept.items()],
        context_length=model.context_length,
        parameters=sum(math.prod(weight.shape) for weight in weights.values()),
        weight_bytes=formats.total(),
        weight_formats=dict(formats.most_common()),
        step_bytes=formats.total() - (0 if idle is None else _held(idle, gpu)[1]),
        kv_dtype=config.kv_dtype,
        kv_bytes_per_token=per_token,
        kv_tokens=num_blocks * config.block_size,
        kv_bytes=num_blocks * config.block_size * per_token,
        free_bytes=free_memory() if gpu is None else gpu.free,
        device="cpu" if gpu is None else gpu.name,
        workspace_bytes=workspace or 0,
        requests={length: num_blocks // -(-length // config.block_size) for length in lengths},
        problem=problem,
    )


def _held(weight: Weight, gpu: Gpu | None) -> tuple[str, int]:
    """The format of a weight and the bytes that it takes where it is computed with."""
    import math

    from unspool.weights.fp8_scales import EIGHT_BIT_FLOATS

    if gpu is not None:
        from unspool.ops.cuda.memory import weight_bytes

        return weight.format, weight_bytes([weight])
    if weight.format in EIGHT_BIT_FLOATS:  # see docs/loading.md
        return f"{weight.format} as bf16", 2 * math.prod(weight.shape)
    return weight.format, weight.nbytes


def gpu_of(namespace: Namespace, config: EngineConfig) -> Gpu | None:
    """The GPU that is planned for: one that was described, or the one that is here."""
    from unspool.ops import uses_cuda

    if namespace.gpu_size is not None:
        total = namespace.gpu_size
        return Gpu("a GPU that is not here", total, total, namespace.gpu_bandwidth, "as told")
    if not uses_cuda(config):
        return None
    from unspool.machine import measure_gpu_bandwidth
    from unspool.ops.cuda import CudaOps

    name, free, total = CudaOps().card()  # or what is missing is told
    speed = namespace.gpu_bandwidth or measure_gpu_bandwidth().bytes_per_second
    how = "as told" if namespace.gpu_bandwidth else "measured by reading 8 GiB"
    return Gpu(name, total, free, speed, how)


_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size(value: str) -> int:
    """141GiB, 80GB, 4.4TB/s: bytes."""
    import re

    match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?)(i?)B?(?:/s)?", value.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or number <= 0:
        raise ArgumentTypeError(f"{value!r} is not a size, as in 141GiB or 80GB")
    return int(number * (1024 if match[3] else 1000) ** _UNITS[match[2].upper()])


def main(argv: Sequence[str]) -> int:
    parser = Parser("plan", "[MODEL] [options]", DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="smollm2", help="as for run's -m (smollm2)")
    parser.add_argument("--random", metavar="SHAPE[:FORMAT]", help="as for run: a shape instead of a model")
    parser.add_argument("--json", action="store_true", help="one object, sizes in bytes and times in seconds")
    parser.add_argument("--kv-tokens", dest="engine.kv_tokens", type=int, metavar="N", help="KV cache for N tokens")
    parser.add_argument("--kv-dtype", dest="engine.kv_dtype", metavar="TYPE", help="KV cache in q8, f16 or f32")
    parser.add_argument("--threads", dest="engine.threads", type=int, metavar="N", help="threads that read memory")
    parser.add_argument("--device", dest="engine.device", metavar="DEVICE", help="auto, cpu or cuda (auto)")
    parser.add_argument(
        "--gpu-size", dest="gpu_size", type=size, metavar="SIZE",
        help="plan for a GPU with so much memory, here or not: 141GiB, 80GB",
    )  # fmt: skip
    parser.add_argument("--gpu-bandwidth", type=size, metavar="RATE", help="that reads so fast: 4.4TB/s")
    parser.add_common()
    namespace = parser.parse_args(argv)
    options = flags.engine_options(namespace)

    from unspool.cli.loading import source_of
    from unspool.cli.terminal import show
    from unspool.config import EngineConfig
    from unspool.machine import Bandwidth, measure_bandwidth
    from unspool.models.checkpoint import Checkpoint, open_checkpoint

    config = EngineConfig(**options)
    gpu = gpu_of(namespace, config)
    source = source_of(namespace)
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    plan = make_plan(checkpoint, config.with_device_defaults("cpu" if gpu is None else "cuda"), gpu)
    if gpu is None:
        bandwidth: Bandwidth | None = measure_bandwidth(config.threads)
    else:
        bandwidth = None if gpu.bytes_per_second is None else Bandwidth(gpu.bytes_per_second, gpu.how)
    if namespace.json:
        import json

        print(json.dumps(as_object(plan, bandwidth)))
    else:
        show(describe(plan, bandwidth))
    return 0


def as_object(plan: Plan, bandwidth: Bandwidth | None) -> dict[str, Any]:
    told = asdict(plan) | {"fits": plan.fits}
    if bandwidth is None:
        return told | {"bandwidth": None, "decode_floor": None}
    floor = plan.step_bytes / bandwidth.bytes_per_second
    full = floor + plan.context_length * plan.kv_bytes_per_token / bandwidth.bytes_per_second
    return told | {
        "bandwidth": asdict(bandwidth) | {"how": bandwidth.how},
        "decode_floor": {"seconds_per_token": floor, "tokens_per_second": 1 / floor, "at_full_context": full},
    }


def describe(plan: Plan, bandwidth: Bandwidth | None) -> str:
    from unspool.cli.terminal import human_bytes as size
    from unspool.cli.terminal import human_number, human_seconds

    bits = 8 * plan.weight_bytes / plan.parameters
    formats = ", ".join(f"{name} {size(count)}" for name, count in plan.weight_formats.items())
    factors = " + ".join(layers.describe(plan.kv_dtype) for layers in plan.kv_layers)
    fitting = ", or ".join(f"{count:,} of {length:,} tokens" for length, count in plan.requests.items())
    whole = f"{size(plan.weight_bytes + plan.kv_bytes)} for weights and a full cache"
    if plan.workspace_bytes:
        whole += f", {size(plan.workspace_bytes)} for a step"
    verdict = "" if plan.fits else ": they do not fit together"
    when = "taken as it is used" if plan.device == "cpu" else "taken at once"
    lines = [
        f"{plan.model}: {plan.architecture}, {plan.num_layers} layers, context {plan.context_length:,}",
        f"weights       {size(plan.weight_bytes)}: {plan.parameters:,} parameters of {bits:.1f} bits ({formats})",
        f"KV cache      {plan.kv_bytes_per_token:,} bytes a token = {factors}",
        f"              room for {plan.kv_tokens:,} tokens, {size(plan.kv_bytes)} when full, {when}",
        f"requests      at once: {fitting}",
        f"memory        {size(plan.free_bytes)} free{_where(plan)}, {whole}{verdict}",
    ]
    if plan.problem is not None:
        lines.append(f"              {plan.problem}")
    if bandwidth is not None:
        told = as_object(plan, bandwidth)["decode_floor"]
        lines += [
            f"bandwidth     {bandwidth.bytes_per_second / 1e9:,.1f} GB/s ({bandwidth.how})",
            f"decode floor  {human_seconds(told['seconds_per_token'])} a token, "
            f"{human_number(told['tokens_per_second'])} tokens/s: {size(plan.step_bytes)} read each step; "
            f"{human_seconds(told['at_full_context'])} with a full context",
        ]
    return "\n".join(lines)


def _where(plan: Plan) -> str:
    return "" if plan.device == "cpu" else f" on {plan.device}"
