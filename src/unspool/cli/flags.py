"""Sampling parameters and EngineConfig as flags of run, chat, explain and `/set`; the sampling flags come from the
registry."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from unspool.cli.parser import NUMBERS, UsageError
from unspool.config import EngineConfig
from unspool.params import BeamParams, Constraint, RepetitionDetector, SamplingParams, kinds, registry
from unspool.params.kinds import Bias, Integer, Number, Order, Text, Texts, TokenIds, Word
from unspool.params.registry import BY_NAME, PARAMETERS, Parameter
from unspool.records import record
from unspool.suggest import nearest
from unspool.user_config import default_model

_ESCAPE = r"(?s)\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.|$)"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}


# Values ------------------------------------------------------------------------------------------------------------
def text(value: str) -> str:
    r"""Text with escapes: \n \t \r \0 \\ \xHH \uHHHH. Any other is refused, so that none is misread."""

    def unescape(match: re.Match[str]) -> str:
        name = match[1]
        if len(name) > 1:
            return chr(int(name[1:], 16))
        if name not in _ESCAPES:
            raise argparse.ArgumentTypeError(
                f"{value!r} has \\{name}, which is no escape; write \\\\ for a backslash (known: \\n \\t \\r \\0 \\\\ "
                "\\xHH \\uHHHH)"
            )
        return _ESCAPES[name]

    return re.sub(_ESCAPE, unescape, value)


def token_ids(value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a list of token ids, as in 2,13") from None


def bias(value: str) -> tuple[int, float]:
    token, _, amount = value.rpartition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not ID=VALUE, as in 13=-5 or 13=-inf") from None


def order(value: str) -> str | list[str]:
    return value.split(",") if "," in value else value


def detector(value: str) -> RepetitionDetector:
    try:
        numbers = [int(part) for part in value.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 3:
        raise argparse.ArgumentTypeError(f"{value!r} is not PERIOD[,REPEATS[,LENGTH]], as in 32,8")
    return RepetitionDetector(*numbers)


def early_stopping(value: str) -> bool | str:
    words: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}
    if value not in words:
        raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(words)}")
    return words[value]


def schema(value: str) -> Any:
    """A JSON schema: the text itself if it looks like one, else a file that contains it."""
    import json

    source = value if value.lstrip().startswith(("{", "true", "false")) else _read(value)
    try:
        return json.loads(source)
    except ValueError as error:
        where = "the text given" if source is value else value
        raise argparse.ArgumentTypeError(f"{where} is not JSON: {error}") from None


def grammar(value: str) -> str:
    return _read(value)


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {reason}") from None


# Sampling ----------------------------------------------------------------------------------------------------------
@record(frozen=True)
class Flag:
    """One flag. `key` is a field of SamplingParams, or of an object in it: `constraint.regex`, `beam.width`."""

    key: str
    parse: Callable[[str], Any] | None  # None: a switch
    metavar: str
    help: str
    many: bool = False  # may be given again; the values are collected
    short: str | None = None
    name: str | None = None  # if it does not follow from the key
    is_interactive: bool = True  # sensible in a chat as well, where an answer is one text on a terminal

    @property
    def flag(self) -> str:
        return self.name or "--" + self.key.split(".")[-1].replace("_", "-")

    @property
    def dest(self) -> str:
        return "sampling." + self.key


# The syntax of each type on the command line: its parser, and whether the flag may be repeated.
SYNTAX: Mapping[type, tuple[Callable[[str], Any] | None, bool]] = {
    Integer: (int, False),
    Number: (float, False),
    kinds.Flag: (None, False),
    Word: (str, False),
    Text: (str, False),
    Texts: (text, True),
    TokenIds: (token_ids, True),
    Bias: (bias, True),
    Order: (order, False),
}
# Objects have flags of their own.
OBJECTS: Mapping[str, tuple[Flag, ...]] = {
    "constraint": (
        Flag("constraint.json_schema", schema, "SCHEMA", "JSON that this schema accepts: a file, or the schema itself"),
        Flag("constraint.json_object", None, "", "any JSON object"),
        Flag("constraint.regex", str, "REGEX", "text that this regular expression matches as a whole"),
        Flag("constraint.choice", text, "TEXT", "one of these texts; repeatable", many=True),
        Flag("constraint.grammar", grammar, "FILE", "text that a Lark grammar produces"),
    ),
    "repetition_detector": (
        Flag(
            "repetition_detector", detector, "P[,R[,L]]",
            "end when at most P tokens came R (8) times in a row, L (0) tokens or more in all",
            name="--stop-on-repetition",
        ),
    ),
    "beam": (
        Flag("beam.width", int, "W", "beam search over W prefixes instead of a draw", name="--beam"),
        Flag("beam.length_penalty", float, "X", "beam scores are divided by length^X (1)"),
        Flag("beam.early_stopping", early_stopping, "WHEN", "yes: end at W complete answers; no (the default); never"),
    ),
}


def flags_of(parameter: Parameter) -> tuple[Flag, ...]:
    """The flags that set a parameter; none if the registry gives a reason."""
    if parameter.no_flag:
        return ()
    if parameter.name in OBJECTS:
        return OBJECTS[parameter.name]
    parse, many = SYNTAX[type(parameter.kind)]
    about = parameter.help.removesuffix(".")
    about = about if about[1].isupper() else about[0].lower() + about[1:]  # DRY, XTC
    if many:
        about += r"; repeatable, with the escapes \n \t \\ \xHH \uHHHH" if parse is text else "; repeatable"
    flag = Flag(
        parameter.name, parse, parameter.metavar, about, many, short=parameter.short or None,
        name=parameter.flag or None, is_interactive=parameter.is_interactive,
    )  # fmt: skip
    return (flag,)


GROUPS: Mapping[str, tuple[Flag, ...]] = {
    group: tuple(flag for parameter in PARAMETERS if parameter.group == group for flag in flags_of(parameter))
    for group in registry.GROUPS
}
FLAGS = tuple(flag for flags in GROUPS.values() for flag in flags)


def add_sampling_flags(parser: argparse.ArgumentParser, *, is_interactive: bool = False) -> None:
    """Add all sampling flags, or those that are useful for one answer shown on a terminal."""
    for title, flags in GROUPS.items():
        wanted = [flag for flag in flags if flag.is_interactive or not is_interactive]
        group = parser.add_argument_group(title) if wanted else None
        for flag in wanted:
            assert group is not None
            names = [flag.short, flag.flag] if flag.short else [flag.flag]
            if flag.parse is None:
                group.add_argument(*names, dest=flag.dest, action="store_true", default=None, help=flag.help)
            else:
                action = "append" if flag.many else "store"
                group.add_argument(
                    *names, dest=flag.dest, action=action, type=flag.parse, metavar=flag.metavar, help=flag.help
                )


def sampling_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """The given flags: key -> value."""
    values = {flag.key: getattr(namespace, flag.dest, None) for flag in FLAGS}
    return {key: value for key, value in values.items() if value is not None}


def sampling_params(values: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    """SamplingParams from values by key; a wrong one is refused by SamplingParams itself."""
    fields: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {"constraint": {}, "beam": {}}
    for key, value in values.items():
        outer, _, inner = key.partition(".")
        if inner:
            nested[outer][inner] = value
        else:
            fields[key] = value
    for key, value in fields.items():
        kind = BY_NAME[key].kind
        if isinstance(kind, TokenIds):
            fields[key] = [token for ids in value for token in ids]
        elif isinstance(kind, Bias):
            fields[key] = dict(value)
    fields |= {"constraint": _constraint(nested["constraint"]), "beam": _beam(nested["beam"])}
    return SamplingParams(**fields, **fixed)


def _constraint(given: Mapping[str, Any]) -> Constraint | None:
    if len(given) > 1:
        names = " and ".join("--" + kind.replace("_", "-") for kind in given)
        raise UsageError(f"{names} are both given; an answer has one shape")
    for kind, value in given.items():
        return Constraint(kind, None if kind == "json_object" else value)  # type: ignore[arg-type]
    return None


def _beam(given: Mapping[str, Any]) -> BeamParams | None:
    if not given:
        return None
    if "width" not in given:
        raise UsageError("a beam search needs its width: --beam W")
    return BeamParams(**given)


def find(name: str, flags: Iterable[Flag] = FLAGS) -> Flag | None:
    """A flag by any of its names: top_p, top-p, --top-p."""
    wanted = name.lstrip("-").replace("-", "_")
    for flag in flags:
        if wanted in (flag.key, flag.flag.lstrip("-").replace("-", "_")):
            return flag
    return None


def value_of(flag: Flag, text: str) -> Any:
    """A flag's value from text, parsed as on the command line; a switch is on or off."""
    if flag.parse is None:
        if text not in ("on", "off"):
            raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
        return text == "on"
    value = NUMBERS.get(flag.parse, flag.parse)(text)
    return [value] if flag.many else value


# Engine ------------------------------------------------------------------------------------------------------------
@record(frozen=True)
class EngineFlag:
    field: str
    parse: Callable[[str], Any] | None
    metavar: str
    help: str
    serving: bool = False  # only for servers
    many: bool = False  # may be given again


def template(path: str) -> str:
    """The chat template in a file."""
    source = _read(path)
    if "{{" not in source and "{%" not in source:
        raise argparse.ArgumentTypeError(f"{path} holds no template: it has neither {{{{ nor {{%")
    return source


OVERRIDE_FLAGS = (
    EngineFlag("chat_template", template, "FILE", "a chat template (Jinja) instead of the model's own"),
    EngineFlag("max_model_len", int, "N", "tokens of a prompt and its answer, instead of the model's context"),
    EngineFlag("rope_scaling", str, "HOW", "instead of the model's: yarn:FACTOR[:ORIGINAL], linear:FACTOR, none, JSON"),
    EngineFlag("rope_theta", float, "X", "the base of the rotary positions, instead of the model's"),
    EngineFlag("override_kv", str, "KEY=TYPE:VALUE", "a key of a GGUF file; type: int, float, bool or str", many=True),
)
ENGINE_FLAGS = (
    EngineFlag("device", str, "DEVICE", "auto, cpu, cuda, or reference (numpy: slow, the specification)"),
    EngineFlag("threads", int, "N", "CPU threads; without it, the cores this process may use"),
    EngineFlag("isa", str, "ISA", "CPU kernels: auto, avx512, avx2, plain"),
    EngineFlag("quantize", str, "TYPE", "weights that are 16 or 32 bits wide as none, fp8, int8 or int4"),
    EngineFlag("kv_tokens", int, "N", "KV cache for N tokens; without it, from the model and the free memory"),
    EngineFlag("state_bytes", int, "N", "for states of recurrent layers and their snapshots; without it, by memory"),
    EngineFlag("gpu_memory", float, "SHARE", "of a GPU's memory that may be in use when the KV cache was made"),
    EngineFlag("kv_dtype", str, "TYPE", "KV cache in q8 (the CPU's), f16 (the GPU's) or f32"),
    EngineFlag("block_size", int, "N", "tokens in one KV block"),
    EngineFlag("step_tokens", int, "N", "tokens computed in one step"),
    EngineFlag("chunk_tokens", int, "N", "of which prompts may take while others stream", serving=True),
    EngineFlag("max_running", int, "N", "requests in one step", serving=True),
    EngineFlag("max_waiting", int, "N", "requests that may wait", serving=True),
    EngineFlag("prefix_cache", None, "", "compute every prompt anew"),
    EngineFlag(
        "speculate", str, "HOW", "lookup, model:PATH, early-exit[:LAYERS], mtp or auto: faster, never different"
    ),
    *OVERRIDE_FLAGS,
)


MODEL_HELP = "a GGUF file, a Hugging Face directory, a hub id (org/name[:file or quant]), smollm2, or a name of " \
    "`unspool config`"  # fmt: skip


def add_model_flag(parser: argparse._ActionsContainer) -> None:
    """Add -m, for commands that read one model."""
    parser.add_argument("-m", "--model", metavar="MODEL", default=default_model(), help=f"{MODEL_HELP} (%(default)s)")


def add_engine_flags(parser: argparse.ArgumentParser, *, serving: bool = False, several: bool = False) -> None:
    """`several`: -m may be given again, and is a list."""
    group = parser.add_argument_group("model and engine")
    if several:
        group.add_argument(
            "-m", "--model", metavar="MODEL", action="append",
            help=f"{MODEL_HELP} ({default_model()}); repeatable, or a directory of models: each is then loaded when it "
            "is asked for",
        )  # fmt: skip
    else:
        add_model_flag(group)
    group.add_argument(
        "--random", metavar="SHAPE[:FORMAT]",
        help="instead of a model, random weights of a shape (llama-8b, llama-1b, qwen3-0.6b, …) in a format (bf16): it "
        "answers with noise, as fast as a real one would",
    )  # fmt: skip
    group.add_argument(
        "--progress", action="store_true",
        help="show how far a long load or prompt is, also where stderr is no terminal",
    )  # fmt: skip
    for flag in ENGINE_FLAGS:
        if flag.serving and not serving:
            continue
        _add_engine_flag(group, flag)


def add_override_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options that override a model's files."""
    group = parser.add_argument_group("instead of the model's own files")
    for flag in OVERRIDE_FLAGS:
        _add_engine_flag(group, flag)


def _add_engine_flag(group: argparse._ArgumentGroup, flag: EngineFlag) -> None:
    dest, name = "engine." + flag.field, flag.field.replace("_", "-")
    default = EngineConfig.__dataclass_fields__[flag.field].default
    if flag.parse is None:
        group.add_argument(f"--no-{name}", dest=dest, action="store_false", default=None, help=flag.help)
        return
    default_note = "" if default in (None, ()) else " (the device's default)" if default == 0 else f" ({default})"
    action = "append" if flag.many else "store"
    group.add_argument(
        f"--{name}", dest=dest, action=action, type=flag.parse, metavar=flag.metavar, help=flag.help + default_note
    )


def engine_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The given options under EngineConfig's names; an unknown value is refused here."""
    values = {flag.field: getattr(namespace, "engine." + flag.field, None) for flag in ENGINE_FLAGS}
    given = {field: value for field, value in values.items() if value is not None}
    for field, allowed in engine_words().items():
        if given.get(field, allowed[0]) not in allowed:
            hint = nearest(str(given[field]), allowed)
            raise UsageError(f"--{field.replace('_', '-')} is {given[field]!r}; allowed: {', '.join(allowed)}{hint}")
    return given


def engine_words() -> dict[str, tuple[str, ...]]:
    from typing import get_args, get_type_hints

    hints = get_type_hints(EngineConfig)
    words = {field.name: get_args(hints[field.name]) for field in dataclasses.fields(EngineConfig)}
    return {name: allowed for name, allowed in words.items() if allowed and all(isinstance(w, str) for w in allowed)}
