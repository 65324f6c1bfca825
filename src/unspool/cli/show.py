"""unspool show: the contents of a model's files, without loading its weights."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unspool.cli.parser import Parser
from unspool.user_config import default_model

if TYPE_CHECKING:
    from unspool.llm import TextModel
    from unspool.models.checkpoint import Checkpoint

DESCRIPTION = """\
What a model's files say: its shape, its vocabulary, its chat template, its own sampling parameters and its tensors.
Nothing is loaded or fetched. `unspool plan` shows what it needs, `unspool doctor` what is wrong with it."""
EPILOG = """\
examples:
  unspool show
  unspool show model.gguf --template
  unspool show model.gguf --tensors | sort -k4
  unspool show org/name --json | jq .config"""
LONGEST = 60  # characters of a value of the metadata


def make_parser() -> Parser:
    parser = Parser("show", "[MODEL] [options]", DESCRIPTION, EPILOG)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=default_model(), help="as run's -m (%(default)s)")
    which = parser.add_argument_group("one part alone, as it is")
    which.add_argument("--template", action="store_true", help="the chat template")
    which.add_argument("--metadata", action="store_true", help="a GGUF file's metadata, or a directory's config.json")
    which.add_argument("--parameters", action="store_true", help="its own sampling parameters")
    which.add_argument("--tensors", action="store_true", help="name, shape, format and bytes of each tensor")
    parser.add_argument("--json", action="store_true", help="one object with everything")
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    from unspool.cli.terminal import show
    from unspool.errors import ModelError, RequestError
    from unspool.llm import TextModel
    from unspool.models.checkpoint import open_checkpoint
    from unspool.weights.store import find

    path = find(namespace.model)
    if path is None:
        raise ModelError(f"{namespace.model} is not here; `unspool pull {namespace.model}` fetches it")
    checkpoint = open_checkpoint(path)
    if namespace.template:
        if checkpoint.chat_template is None:
            raise RequestError(f"{checkpoint.name} has no chat template", "model")
        print(checkpoint.chat_template)
    elif namespace.metadata:
        for key, value in metadata_of(checkpoint).items():
            print(f"{key} = {short(value)}")
    elif namespace.parameters:
        for name, value in checkpoint.generation.items():
            print(f"{name} = {value}")
    elif namespace.tensors:
        for weight in checkpoint.weights.values():
            print(f"{weight.name}  {'×'.join(map(str, weight.shape))}  {weight.format}  {weight.nbytes}")
    else:
        model = TextModel(checkpoint, checkpoint.tokenizer())
        if namespace.json:
            import json

            print(json.dumps(as_object(model), ensure_ascii=False))
        else:
            show("\n".join(describe(model)))
    return 0


def metadata_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The file's metadata by name and value; arrays are unchanged."""
    if checkpoint.path.is_dir():
        from unspool.weights.fields import read_json

        return read_json(checkpoint.path / "config.json")
    from unspool.weights.gguf import open_gguf

    return dict(open_gguf(checkpoint.path).metadata)


def short(value: Any) -> str:
    """A value in one line: a long text is shortened, an array is shown by its length."""
    if isinstance(value, str):
        line = value.replace("\n", "\\n")
        return line if len(line) <= LONGEST else f"{line[:LONGEST]}… ({len(value):,} characters)"
    if isinstance(value, Sequence) and len(value) > 8:
        return f"[{', '.join(map(short, value[:3]))}, … {len(value):,} in all]"
    return str(list(value)) if isinstance(value, Sequence) else str(value)


def formats_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Bytes of weights by format, largest first."""
    sizes: Counter[str] = Counter()
    for weight in checkpoint.weights.values():
        sizes[weight.format] += weight.nbytes
    return dict(sizes.most_common())


def num_parameters(checkpoint: Checkpoint) -> int:
    import math

    return sum(math.prod(weight.shape) for weight in checkpoint.weights.values())


def describe(model: TextModel) -> Iterator[str]:
    from unspool.cli.terminal import human_bytes

    checkpoint, config, tokenizer = model.checkpoint, model.checkpoint.config, model.tokenizer
    formats = formats_of(checkpoint)
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in formats.items())
    yield f"{checkpoint.name}  {checkpoint.path}"
    heads = f"{config.num_heads} heads of {config.head_dim}"
    if config.num_kv_heads != config.num_heads:
        heads += f" ({config.num_kv_heads} for keys and values)"
    yield (
        f"architecture  {config.architecture}: {config.num_layers} layers, {config.hidden_size:,} wide, {heads}, "
        f"feed-forward {config.intermediate_size:,}"
    )
    yield f"parameters    {num_parameters(checkpoint):,} in {human_bytes(sum(formats.values()))}: {parts}"
    yield f"context       {config.context_length:,} tokens"
    yield f"vocabulary    {tokenizer.vocab_size:,} tokens; {_ends(model)}"
    yield f"template      {_template(model)}"
    defaults = ", ".join(f"{name} {short(value)}" for name, value in checkpoint.generation.items())
    yield f"defaults      {defaults or 'none of its own; those of unspool hold'}"
    for note in (*checkpoint.notes, *tokenizer.notes):
        yield f"note          {note}"
    about = metadata_of(checkpoint)
    for name in ("license", "author", "url"):
        if isinstance(about.get(f"general.{name}"), str):
            yield f"{name:<14}{short(about[f'general.{name}'])}"


def _ends(model: TextModel) -> str:
    tokenizer = model.tokenizer
    ends = sorted(tokenizer.eos_ids | set(model.checkpoint.eos_ids))
    named = [f"{tokenizer.token_text(id)} ({id})" for id in ends if id < tokenizer.vocab_size]
    begins = ""
    if tokenizer.adds_bos and tokenizer.bos_id is not None:
        begins = f"begins with {tokenizer.token_text(tokenizer.bos_id)}, "
    return f"{begins}ends with {', '.join(named)}" if named else f"{begins}no end token"


def _template(model: TextModel) -> str:
    if model.checkpoint.chat_template is None or model.template is None:
        return "none: `unspool run` continues text"
    parts = [f"{len(model.checkpoint.chat_template):,} characters"]
    chat = model.model_chat
    parts.append("has a place for tools" if chat.shows_tools else "tools are described in the first message")
    if chat.reasoning_format is not None:
        parts.append("thinks before it answers")
    return ", ".join(parts)


def as_object(model: TextModel) -> dict[str, Any]:
    from unspool.params.resolve import jsonable

    checkpoint, tokenizer = model.checkpoint, model.tokenizer
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "fingerprint": checkpoint.fingerprint,
        "config": jsonable(dataclasses.asdict(checkpoint.config)),
        "num_parameters": num_parameters(checkpoint),
        "bytes": formats_of(checkpoint),
        "vocabulary": {
            "size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_ids": sorted(tokenizer.eos_ids | set(checkpoint.eos_ids)),
            "special": {str(id): tokenizer.token_text(id) for id in sorted(tokenizer.special_ids)},
        },
        "chat_template": checkpoint.chat_template,
        "tool_template": checkpoint.tool_template,
        "parameters": jsonable(checkpoint.generation),
        "notes": [*checkpoint.notes, *tokenizer.notes],
        "metadata": {key: _counted(value) for key, value in metadata_of(checkpoint).items()},
        "tensors": [
            {"name": weight.name, "shape": list(weight.shape), "format": weight.format, "bytes": weight.nbytes}
            for weight in checkpoint.weights.values()
        ],
    }


def _counted(value: Any) -> Any:
    """Replaces long arrays of a file, such as its vocabulary, by their length."""
    if isinstance(value, Mapping):
        return {str(key): _counted(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {"length": len(value)} if len(value) > 64 else [_counted(one) for one in value]
    return value
