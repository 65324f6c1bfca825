"""SamplingParams and EngineConfig as flags: one table each, from which run, chat, explain and `/set` are made."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unspool.cli.parser import NUMBERS, UsageError
from unspool.config import EngineConfig
from unspool.params import BeamParams, Constraint, RepetitionDetector, SamplingParams

_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.|$)", re.DOTALL)
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

    return _ESCAPE.sub(unescape, value)


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
    period, _, repeats = value.partition(",")
    try:
        return RepetitionDetector(int(period), int(repeats) if repeats else RepetitionDetector.repeats)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not PERIOD or PERIOD,REPEATS, as in 32,8") from None


def early_stopping(value: str) -> bool | str:
    words: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}
    if value not in words:
        raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(words)}")
    return words[value]


def schema(value: str) -> Any:
    """A JSON schema: the text itself where it starts like one, else a file that holds it."""
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
@dataclass(frozen=True)
class Flag:
    """One flag. `key` is a field of SamplingParams, or of what it holds: `constraint.regex`, `beam.width`."""

    key: str
    parse: Callable[[str], Any] | None  # None: a switch
    metavar: str
    help: str
    many: bool = False  # may be given again; the values are collected
    short: str | None = None
    name: str | None = None  # where the key does not give it
    alone: bool = True  # sensible in a chat as well, where an answer is one text on a terminal

    @property
    def flag(self) -> str:
        return self.name or "--" + self.key.split(".")[-1].replace("_", "-")

    @property
    def dest(self) -> str:
        return "sampling." + self.key


GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "length and stops": (
        Flag("max_tokens", int, "N", "at most N tokens; without it, until the model ends it or the context is full",
             short="-n"),
        Flag("min_tokens", int, "N", "the answer cannot end by itself before N tokens"),
        Flag("stop", text, "TEXT", r"end before TEXT; repeatable. \n \t \\ \xHH \uHHHH are understood", many=True),
        Flag("stop_token_ids", token_ids, "ID,…", "end at one of these tokens; repeatable", many=True),
        Flag("include_stop_str", None, "", "keep the stop text in the answer"),
        Flag("ignore_eos", None, "", "go on past the model's end tokens"),
        Flag("repetition_detector", detector, "P[,R]", "end when at most P tokens came R (8) times in a row",
             name="--stop-on-repetition"),
        Flag("deadline_ms", float, "MS", "end after this many milliseconds, with what there is"),
    ),
    "choosing a token (model's own defaults apply; 1 or 0 turns a filter off)": (
        Flag("temperature", float, "T", "divides the logits: below 1 bolder, above 1 more varied, 0 always the best"),
        Flag("top_k", int, "K", "only the K likeliest; 0: off"),
        Flag("top_p", float, "P", "the fewest tokens that hold P of the probability; 1: off"),
        Flag("min_p", float, "P", "only tokens at least P times as likely as the likeliest; 0: off"),
        Flag("typical_p", float, "P", "the most typical tokens that hold P of the probability; 1: off"),
        Flag("top_n_sigma", float, "N", "only logits within N standard deviations of the best; 0: off"),
        Flag("xtc_probability", float, "P", "how often to leave out the likeliest choices; 0: off"),
        Flag("xtc_threshold", float, "P", "which those are: all likelier than P but the least likely of them"),
        Flag("order", order, "ORDER", "unspool, transformers, vllm, llama.cpp, mlx, or a list of stages"),
    ),
    "penalties": (
        Flag("repetition_penalty", float, "R", "tokens that were there: positive logits / R, others · R; 1: off"),
        Flag("frequency_penalty", float, "F", "minus F for each time a token was there; 0: off"),
        Flag("presence_penalty", float, "F", "minus F if a token was there at all; 0: off"),
        Flag("penalty_window", int, "N", "look back on N tokens; -1: all"),
        Flag("penalty_scope", str, "SCOPE", "count in all, output, or mixed (repetition in all, others in output)"),
        Flag("dry_multiplier", float, "M", "DRY: against repeating long stretches; 0: off"),
        Flag("dry_base", float, "B", "DRY: the penalty is M · B^(length - allowed)"),
        Flag("dry_allowed_length", int, "N", "DRY: repeats up to this long are free"),
        Flag("dry_sequence_breakers", text, "TEXT", r"DRY: a repeat ends at TEXT; repeatable, with escapes", many=True),
        Flag("dry_window", int, "N", "DRY: look back on N tokens; -1: all"),
        Flag("no_repeat_ngram", int, "N", "no run of N tokens comes twice; 0: off"),
    ),
    "which tokens, and what shape": (
        Flag("logit_bias", bias, "ID=X", "add X to a token's logit, -inf bans it; repeatable", many=True),
        Flag("allowed_token_ids", token_ids, "ID,…", "only these tokens; repeatable", many=True),
        Flag("bad_words", text, "TEXT", "TEXT never appears; repeatable, with escapes", many=True),
        Flag("constraint.json_schema", schema, "SCHEMA", "JSON that this schema accepts: a file, or the schema itself"),
        Flag("constraint.json_object", None, "", "any JSON object"),
        Flag("constraint.regex", str, "REGEX", "text that this regular expression matches as a whole"),
        Flag("constraint.choice", text, "TEXT", "one of these texts; repeatable", many=True),
        Flag("constraint.grammar", grammar, "FILE", "text that a Lark grammar produces"),
    ),
    "how many, from which noise": (
        Flag("seed", int, "SEED", "the same seed gives the same answer; without it one is drawn and told"),
        Flag("n", int, "N", "N answers", alone=False),
        Flag("best_of", int, "N", "draw N answers, keep those with the best mean logprob"),
        Flag("beam.width", int, "W", "beam search over W prefixes instead of a draw", name="--beam"),
        Flag("beam.length_penalty", float, "X", "beam scores are divided by length^X (1)"),
        Flag("beam.early_stopping", early_stopping, "WHEN", "yes: end at W complete answers; no (the default); never"),
    ),
    "what is told (with --json)": (
        Flag("logprobs", int, "K", "each token's logprob and those of the K likeliest", alone=False),
        Flag("logprobs_stage", str, "STAGE", "logprobs of the raw or of the final distribution", alone=False),
        Flag("prompt_logprobs", int, "K", "the same for the prompt's tokens", alone=False),
    ),
}
FLAGS = tuple(flag for flags in GROUPS.values() for flag in flags)
# Fields that have no flag, and why.
NOT_FLAGS = {
    "trace": "`unspool explain` sets it",
    "priority": "a command runs one request",
    "cache_salt": "a command has one user",
    "speculate": "the engine's --speculate holds for its one request",
}


def add_sampling_flags(parser: argparse.ArgumentParser, *, alone: bool = False) -> None:
    """All of them, or those that make sense for one answer shown on a terminal (`alone`)."""
    for title, flags in GROUPS.items():
        wanted = [flag for flag in flags if flag.alone or not alone]
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
    """The flags that were given: key -> value."""
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
    for key in ("stop_token_ids", "allowed_token_ids"):
        if key in fields:
            fields[key] = [token for ids in fields[key] for token in ids]
    if "logit_bias" in fields:
        fields["logit_bias"] = dict(fields["logit_bias"])
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
    """What a text given for a flag means, as the command line would have read it; a switch is on or off."""
    if flag.parse is None:
        if text not in ("on", "off"):
            raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
        return text == "on"
    value = NUMBERS.get(flag.parse, flag.parse)(text)
    return [value] if flag.many else value


# Engine ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EngineFlag:
    field: str
    parse: Callable[[str], Any] | None
    metavar: str
    help: str
    serving: bool = False  # only where many share an engine


ENGINE_FLAGS = (
    EngineFlag("device", str, "DEVICE", "auto, cpu, cuda, or reference (numpy: slow, the specification)"),
    EngineFlag("threads", int, "N", "CPU threads; without it, the cores this process may use"),
    EngineFlag("isa", str, "ISA", "CPU kernels: auto, avx512, avx2, plain"),
    EngineFlag("quantize", str, "TYPE", "weights that are 16 or 32 bits wide as none, fp8, int8 or int4"),
    EngineFlag("kv_tokens", int, "N", "KV cache for N tokens; without it, from the model and the free memory"),
    EngineFlag("gpu_memory", float, "SHARE", "of a GPU's memory that may be in use when the KV cache was made"),
    EngineFlag("kv_dtype", str, "TYPE", "KV cache in q8 (the CPU's), f16 (the GPU's) or f32"),
    EngineFlag("block_size", int, "N", "tokens in one KV block"),
    EngineFlag("step_tokens", int, "N", "tokens computed in one step"),
    EngineFlag("chunk_tokens", int, "N", "of which prompts may take while others stream", serving=True),
    EngineFlag("max_running", int, "N", "requests in one step", serving=True),
    EngineFlag("max_waiting", int, "N", "requests that may wait", serving=True),
    EngineFlag("prefix_cache", None, "", "compute every prompt anew"),
    EngineFlag("speculate", str, "HOW", "lookup, model:PATH, early-exit[:LAYERS] or auto: faster, never different"),
)


def add_engine_flags(parser: argparse.ArgumentParser, *, serving: bool = False) -> None:
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "-m", "--model", metavar="MODEL", default="smollm2",
        help="smollm2 (the default), a GGUF file, a Hugging Face directory, or a hub id (org/name[:file or quant])",
    )  # fmt: skip
    group.add_argument(
        "--random", metavar="SHAPE[:FORMAT]",
        help="instead of a model, random weights of a shape (llama-8b, llama-1b, qwen3-0.6b, …) in a format (bf16): it "
        "answers with noise, as fast as a real one would",
    )  # fmt: skip
    for flag in ENGINE_FLAGS:
        if flag.serving and not serving:
            continue
        dest, name = "engine." + flag.field, flag.field.replace("_", "-")
        default = EngineConfig.__dataclass_fields__[flag.field].default
        if flag.parse is None:
            group.add_argument(f"--no-{name}", dest=dest, action="store_false", default=None, help=flag.help)
        else:
            told = "" if default is None else " (what suits the device)" if default == 0 else f" ({default})"
            group.add_argument(
                f"--{name}", dest=dest, type=flag.parse, metavar=flag.metavar, help=flag.help + told
            )


def engine_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, by EngineConfig's names; a word that it does not know is refused here."""
    values = {flag.field: getattr(namespace, "engine." + flag.field, None) for flag in ENGINE_FLAGS}
    given = {field: value for field, value in values.items() if value is not None}
    for field, allowed in _words().items():
        if given.get(field, allowed[0]) not in allowed:
            raise UsageError(f"--{field.replace('_', '-')} is {given[field]!r}; allowed: {', '.join(allowed)}")
    return given


def _words() -> dict[str, tuple[str, ...]]:
    from typing import get_args, get_type_hints

    hints = get_type_hints(EngineConfig)
    words = {field.name: get_args(hints[field.name]) for field in dataclasses.fields(EngineConfig)}
    return {name: allowed for name, allowed in words.items() if allowed and all(isinstance(w, str) for w in allowed)}
