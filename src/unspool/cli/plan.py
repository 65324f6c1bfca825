"""unspool plan: what a model needs and how fast it can be, from its headers alone, on this machine or another."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from unspool.cli import flags
from unspool.cli.parser import Parser, UsageError
from unspool.user_config import default_model

if TYPE_CHECKING:
    from argparse import Namespace

    from unspool.config import EngineConfig
    from unspool.models.checkpoint import Checkpoint
    from unspool.planning import Floor, Plan, Planner, Target

DESCRIPTION = """\
What a model needs and how fast it can be, before it is loaded: only its headers are read. Floors are what every engine
has to obey: to make one token, the weights have to come through memory once; to read a prompt, its products have to be
computed."""
EPILOG = """\
examples:
  unspool plan model.gguf                              this machine
  unspool plan model.gguf --on "RTX 4090"              another one
  unspool plan --random llama2-70b:f16 --on h100       a shape instead of a model
  unspool plan --on list                               the hardware that is known, and the sources"""


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    if namespace.on is not None and namespace.on.lower() == "list":
        return list_hardware(as_json=namespace.json)
    from unspool.cli.loading import all_options
    from unspool.cli.terminal import show
    from unspool.config import EngineConfig
    from unspool.planning import Planner

    config = EngineConfig(**all_options(namespace))
    target = target_of(namespace, config)
    checkpoint = _checkpoint(namespace, config)
    planner = Planner(checkpoint.name, checkpoint.config, checkpoint.weights, config, target, namespace.tokens)
    if namespace.json:
        import json

        overrides = {"overrides": [each.as_dict() for each in checkpoint.overrides]}
        print(json.dumps(as_object(planner, target) | overrides))
    else:
        show("\n".join([describe(planner, target), *override_lines(checkpoint)]))
    return 0


def override_lines(checkpoint: Checkpoint) -> list[str]:
    """A line for each value that overrides the model's own."""
    heads = ["overrides     ", *([" " * 14] * len(checkpoint.overrides))]
    return [
        f"{head}{each.option} {each.value} (in the model: {each.before or 'nothing'})"
        for head, each in zip(heads, checkpoint.overrides, strict=False)
    ]


def make_parser() -> Parser:
    parser = Parser("plan", "[MODEL] [options]", DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=default_model(), help="as run's -m (%(default)s)")
    parser.add_argument("--random", metavar="SHAPE[:FORMAT]", help="as for run: a shape instead of a model")
    parser.add_argument("--on", metavar="NAME", help="hardware that is not here: h100, rtx-4090, m4-max, …; list: all")
    parser.add_argument("--memory", type=size, metavar="SIZE", help="of that hardware, where it is not the usual one")
    parser.add_argument("--tokens", type=int, metavar="N", help="of a request, prompt and answer (1024)")
    parser.add_argument("--measure", action="store_true", help="measure this machine again; once it is enough")
    parser.add_argument("--json", action="store_true", help="one object, sizes in bytes and times in seconds")
    parser.add_argument("--kv-tokens", dest="engine.kv_tokens", type=int, metavar="N", help="KV cache for N tokens")
    parser.add_argument(
        "--max-running", dest="engine.max_running", type=int, metavar="N",
        help="requests at once, for whose windows there is room (256)",
    )  # fmt: skip
    parser.add_argument("--kv-dtype", dest="engine.kv_dtype", metavar="TYPE", help="KV cache in q8, f16 or f32")
    parser.add_argument(
        "--state-bytes", dest="engine.state_bytes", type=size, metavar="SIZE",
        help="for states of recurrent layers and snapshots of them: 2GiB",
    )  # fmt: skip
    parser.add_argument("--threads", dest="engine.threads", type=int, metavar="N", help="threads that read memory")
    parser.add_argument("--device", dest="engine.device", metavar="DEVICE", help="auto, cpu or cuda (auto)")
    parser.add_argument(
        "--gpu-size", type=size, metavar="SIZE", help="plan for a GPU with so much memory, here or not: 141GiB, 80GB"
    )
    parser.add_argument("--gpu-memory", dest="engine.gpu_memory", type=float, metavar="SHARE",
                        help="of a GPU's memory that may be in use (0.9)")  # fmt: skip
    parser.add_argument("--gpu-bandwidth", type=size, metavar="RATE", help="that reads so fast: 4.4TB/s")
    flags.add_override_flags(parser)
    parser.add_common()
    return parser


def _checkpoint(namespace: Namespace, config: EngineConfig) -> Checkpoint:
    from unspool.cli.loading import locate
    from unspool.models.checkpoint import open_checkpoint
    from unspool.models.overridden import overridden

    if namespace.random is None:
        return overridden(open_checkpoint(locate(namespace.model)), config)
    from unspool.models.random import outline

    return overridden(outline(namespace.random), config)


# The machine --------------------------------------------------------------------------------------------------------
def target_of(namespace: Namespace, config: EngineConfig) -> Target:
    """The target of the plan: named or described hardware, this machine's GPU, or this machine."""
    from unspool.planning import Target

    given = [name for name in ("on", "gpu_size") if getattr(namespace, name) is not None]
    if len(given) > 1:
        raise UsageError("--on and --gpu-size both say what is planned for; give one")
    if namespace.memory is not None and namespace.on is None:
        raise UsageError("--memory is of the hardware that --on names")
    if namespace.tokens is not None and namespace.tokens < 1:
        raise UsageError(f"--tokens is {namespace.tokens}; allowed: 1 or more")
    if namespace.on is not None:
        return _named(namespace.on, namespace.memory)
    if namespace.gpu_size is not None:
        total = namespace.gpu_size
        return Target("a GPU that is not here", "cuda", total, total, namespace.gpu_bandwidth, "as told")
    from unspool.ops import uses_cuda

    return _gpu_here(namespace.gpu_bandwidth) if uses_cuda(config) else _computer_here(config, again=namespace.measure)


def _named(name: str, memory: int | None) -> Target:
    from unspool.hardware import find_hardware
    from unspool.planning import Target

    found = find_hardware(name)
    total = int(memory or found.memory)
    kind = "cuda" if found.kind == "gpu" else "cpu"
    how = f"{found.title}, as its maker says"
    return Target(found.title, kind, total, total, found.bandwidth, how, found.compute, how)  # type: ignore[arg-type]


def _gpu_here(bandwidth: float | None) -> Target:
    from unspool.ceilings import ceilings
    from unspool.ops.cuda import CudaOps
    from unspool.planning import Target

    name, free, total = CudaOps().card()  # raises an error that names what is missing
    limits = ceilings("cuda")
    how = f"measured on {limits.measured[:10]}"
    return Target(
        name, "cuda", total, free, bandwidth or limits.bandwidth, "as told" if bandwidth else how, limits.compute, how
    )


def _computer_here(config: EngineConfig, *, again: bool) -> Target:
    from unspool.ceilings import ceilings
    from unspool.machine import free_memory
    from unspool.planning import Target

    limits, free = ceilings("cpu", config.threads, again=again), free_memory()
    how = f"measured on {limits.measured[:10]}, {limits.threads} threads"
    if not limits.is_reliable:
        how += f", too low: other programs kept {limits.disturbed:.1f} cores busy"
    return Target("", "cpu", free, free, limits.bandwidth, how, limits.compute, f"{how}, {limits.kernels}")


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


def list_hardware(*, as_json: bool) -> int:
    from unspool.hardware import HARDWARE

    if as_json:
        import json

        print(json.dumps({"hardware": [asdict(each) for each in HARDWARE.values()]}))
        return 0
    print(f"{'name':<11}{'memory':>8}{'bandwidth':>12}{'compute':>13}{'balance':>10}  source")
    for each in HARDWARE.values():
        print(
            f"{each.name:<11}{each.memory / 1e9:>5.0f} GB{each.bandwidth / 1e9:>7.0f} GB/s"
            f"{each.compute / 1e12:>6.1f} TFLOP/s{each.balance:>10.0f}  {each.source}"
        )
    print("balance: operations that can be computed while one byte is read")
    return 0


# Reporting ----------------------------------------------------------------------------------------------------------
def as_object(planner: Planner, target: Target) -> dict[str, Any]:
    """The object of docs/schemas/plan.json. Unknown values are null."""
    plan, tokens = planner.plan(), planner.request_tokens
    decode, full = planner.decode_floor(), planner.decode_floor(plan.context_length)
    described: dict[str, Any] = asdict(plan) | {"fits": plan.fits}
    described["bandwidth"] = _speed(target.bandwidth, "bytes_per_second", target.bandwidth_how)
    described["compute"] = _speed(target.compute, "flops", target.compute_how)
    described["decode_floor"] = None
    if decode is not None and full is not None:
        described["decode_floor"] = {
            "seconds_per_token": decode.seconds,
            "tokens_per_second": 1 / decode.seconds,
            "at_full_context": full.seconds,
        }
    prefill = planner.prefill_floor(tokens)
    described["prefill_floor"] = None if prefill is None else {"tokens": tokens, **_rate(prefill, tokens)}
    batches = {context: planner.compute_bound_batch(context) for context in (0, tokens)}
    described["compute_bound_batch"] = None if target.compute is None else batches
    described["users"] = _users(planner, plan)
    return described


def _speed(value: float | None, unit: str, how: str) -> dict[str, Any] | None:
    return None if value is None else {unit: value, "how": how}


def _rate(floor: Floor, tokens: int) -> dict[str, Any]:
    return {"seconds": floor.seconds, "tokens_per_second": tokens / floor.seconds, "bound": floor.bound}


def _users(planner: Planner, plan: Plan) -> dict[str, Any] | None:
    """The minimum time of one step with as many requests as fit, each with its own tokens."""
    tokens = planner.request_tokens
    count = plan.requests[tokens]
    floor = planner.decode_floor(tokens, count) if count else None
    if floor is None:
        return None
    return {"tokens": tokens, "at_once": count, "step": floor.seconds, "tokens_per_second": count / floor.seconds,
            "bound": floor.bound}  # fmt: skip


def describe(planner: Planner, target: Target) -> str:
    from unspool.cli.terminal import human_bytes as size

    plan = planner.plan()
    bits = 8 * plan.weight_bytes / plan.parameters
    formats = ", ".join(f"{name} {size(count)}" for name, count in plan.weight_formats.items())
    factors = " + ".join(layers.describe(plan.kv_dtype) for layers in plan.kv_layers)
    fitting = ", or ".join(f"{count:,} of {length:,} tokens" for length, count in plan.requests.items())
    whole = f"{size(plan.total_bytes)} for weights and a full cache"
    if plan.workspace_bytes:
        whole += f", {size(plan.workspace_bytes)} for a step"
    verdict = "" if plan.fits else ": they do not fit together"
    when = "taken at once" if target.kind == "cuda" else "taken as it is used"
    where = f" on {target.name}" if target.name else ""
    lines = [
        f"{plan.model}: {plan.architecture}, {plan.num_layers} layers, context {plan.context_length:,}",
        f"weights       {size(plan.weight_bytes)}: {plan.parameters:,} parameters of {bits:.1f} bits ({formats})",
        f"KV cache      {plan.kv_bytes_per_token:,} bytes a token = {factors}",
        f"              room for {plan.kv_tokens:,} tokens, {size(plan.kv_bytes)} when full, {when}",
        f"requests      at once: {fitting}",
        f"memory        {size(plan.free_bytes)} free{where}, {whole}{verdict}",
    ]
    lines[4:4] = [
        f"windows       {each.num_layers} layers see {each.window:,} tokens and keep at most {each.held_tokens:,} of a "
        f"sequence: room for {each.kv_tokens:,} tokens, {size(each.kv_bytes)} of the cache"
        for each in plan.windows
    ]
    if plan.state_bytes:
        lines[4:4] = [
            f"states        {size(plan.state_bytes)} a sequence: what recurrent layers keep, however long it is",
            f"              room for {plan.num_states:,} sequences and snapshots, "
            f"{size(plan.num_states * plan.state_bytes)} when all are taken, {when}",
        ]
    if plan.problem is not None:
        lines.append(f"              {plan.problem}")
    return "\n".join([*lines, *_times(as_object(planner, target))])


def _times(described: dict[str, Any]) -> list[str]:
    from unspool.cli.terminal import human_bytes as size
    from unspool.cli.terminal import human_number, human_seconds

    lines, tokens = [], described["request_tokens"]
    if described["bandwidth"] is not None:
        floor, speed = described["decode_floor"], described["bandwidth"]
        lines += [
            f"bandwidth     {speed['bytes_per_second'] / 1e9:,.1f} GB/s ({speed['how']})",
            f"decode floor  {human_seconds(floor['seconds_per_token'])} a token, "
            f"{human_number(floor['tokens_per_second'])} tokens/s: {size(described['step_bytes'])} read each step; "
            f"{human_seconds(floor['at_full_context'])} with a full context",
        ]
    if described["compute"] is not None:
        prefill, speed = described["prefill_floor"], described["compute"]
        lines += [
            f"compute       {speed['flops'] / 1e12:,.2f} TFLOP/s ({speed['how']})",
            f"prefill floor {human_seconds(prefill['seconds'])} for {prefill['tokens']:,} tokens, "
            f"{human_number(prefill['tokens_per_second'])} tokens/s: limited by {prefill['bound']}",
        ]
        first, behind = described["compute_bound_batch"][0], described["compute_bound_batch"][tokens]
        after = f"never: reading their keys and values takes longer behind {tokens:,} tokens each"
        lines.append(
            "batch         decode is limited by compute from "
            + ("no batch size on" if first is None else f"{first:,} at once")
            + "; "
            + (after if behind is None else f"from {behind:,} behind {tokens:,} tokens each")
        )
    if described["users"] is not None:
        users = described["users"]
        lines.append(
            f"users         {users['at_once']:,} at once with {users['tokens']:,} tokens each: a step takes at least "
            f"{human_seconds(users['step'])}, {human_number(users['tokens_per_second'])} tokens/s for all"
        )
    return lines
