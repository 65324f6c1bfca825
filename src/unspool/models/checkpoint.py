"""A checkpoint: one opened model, from any kind of file.

Weights are canonical: they have GGUF's names and conventions. So the names of a Hugging Face directory are mapped, and
tensors that its family stores by another convention are converted (see the family's file). All other bytes stay those
of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.config import NO_OVERRIDES, EngineConfig, ModelConfig, overrides_of
from unspool.digest import sha256
from unspool.errors import ModelError
from unspool.models.registry import (
    canonical_draft_weights,
    canonical_weights,
    config_from_gguf,
    config_from_json,
    gguf_draft_weights,
    gguf_weights,
)
from unspool.records import record
from unspool.weights.fields import Fields, is_text, read_json
from unspool.weights.generation import (
    generation_from_gguf,
    generation_from_json,
    ignored_of_gguf,
    ignored_of_json,
)
from unspool.weights.gguf import GGUFFile, open_gguf
from unspool.weights.mapping import read_samples, release
from unspool.weights.weight import Weight

if TYPE_CHECKING:
    from unspool.overrides import Override
    from unspool.text.tokenizer import Tokenizer

MAX_TEMPLATE = 1 << 20
SAMPLES = 16  # chunks of each tensor that the fingerprint reads
SAMPLE_BYTES = 256


@record(frozen=True, eq=False)
class Checkpoint:
    """A model that can be built: its config, its weights, its tokenizer, and its defaults."""

    path: Path
    name: str
    config: ModelConfig
    weights: Mapping[str, Weight]
    tokenizer: Callable[[], Tokenizer]  # made on demand: not every use of a checkpoint needs one
    chat_template: str | None
    generation: Mapping[str, Any]  # the model's own sampling defaults, by SamplingParams' names
    eos_ids: tuple[int, ...]  # end tokens that the model's files name, in addition to those of its tokenizer
    tool_template: str | None = None  # for conversations with tools, if the model has a separate template for them
    notes: tuple[str, ...] = ()  # settings of its files that are not supported; every answer carries them as warnings
    overrides: tuple[Override, ...] = ()  # values that a caller has set in place of those in the files
    overridden_by: tuple[Any, ...] = ()  # the options of these overrides
    # Weights of the draft head (multi-token prediction); empty if the files have none. Answers do not depend on them.
    draft_weights: Callable[[], Mapping[str, Weight]] = dict

    def with_overrides(self, config: EngineConfig) -> Checkpoint:
        """With the values that an EngineConfig sets in place of those in the files: itself, if there are none."""
        if overrides_of(config) == NO_OVERRIDES:
            return self
        from unspool.models.overridden import overridden

        return overridden(self, config)

    @cached_property
    def fingerprint(self) -> str:
        """A hash that identifies a model: the config, and each tensor's name, format, shape and bytes.

        A tensor of more than 4 KiB is represented by 16 chunks of 256 bytes at even distances, so that fingerprinting
        reads a few megabytes of a model of any size. It distinguishes models and quantizations; it does not detect
        someone who changes bytes between the samples.
        """
        digest = sha256(self.config.identity.encode())
        for override in self.overrides:
            if override.option == "override_kv":  # other overrides change the config or only the prompt
                digest.update(f"\noverride {override.value}".encode())
        for name in sorted(self.weights):
            weight = self.weights[name]
            digest.update(f"\n{name} {weight.format} {weight.shape}\n".encode())
            if weight.nbytes <= SAMPLES * SAMPLE_BYTES:
                digest.update(weight.raw)
                continue
            digest.update(read_samples(weight.raw, sample_places(weight.nbytes), SAMPLE_BYTES))
        return digest.hexdigest()


def sample_places(nbytes: int) -> list[int]:
    """Where a tensor's samples begin: at even distances, and the last one ends with the tensor."""
    last = nbytes - SAMPLE_BYTES
    return [*(int(i * (last / (SAMPLES - 1))) for i in range(SAMPLES - 1)), last]


def open_checkpoint(path: str | Path, overrides: Sequence[str] = ()) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory. `overrides` set keys of a GGUF file, as KEY=TYPE:VALUE."""
    path = Path(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if not path.is_dir():
        return _open_file(path, overrides)
    if overrides:
        raise ModelError(f"override_kv sets keys of GGUF files; {path} is a directory")
    return _open_directory(path)


# --- one file ----------------------------------------------------------------------------------------------------


def _open_file(path: Path, overrides: Sequence[str] = ()) -> Checkpoint:
    file = open_gguf(path)
    changed = None
    if overrides:
        from unspool.weights.overridden import OverriddenKeys

        changed = OverriddenKeys(path, file.metadata, overrides)
        file = replace(file, metadata=changed)
    config = config_from_gguf(file)
    keys = Fields(path, file.metadata, "tokenizer.")
    # The user may have put defaults next to the file. GGUF has keys for defaults, but files rarely use them.
    beside, notes, _ = _generation_file(path.with_suffix(".generation_config.json"), config)

    def tokenizer() -> Tokenizer:
        from unspool.text.tokenizer import from_gguf

        made = from_gguf(file.metadata)
        if changed is not None:
            changed.check_read("")
        release([file.header])  # making the tables has read every token; a text needs few of them
        return made

    checkpoint = Checkpoint(
        path=path,
        name=model_name(path),
        config=config,
        weights=gguf_weights(file, config),
        draft_weights=lambda: gguf_draft_weights(file, config),
        tokenizer=tokenizer,
        chat_template=_bounded(path, keys.optional_string("chat_template")),
        tool_template=_bounded(path, keys.optional_string("chat_template.tool_use")),
        generation=generation_from_gguf(path, file.metadata) | beside,
        eos_ids=_gguf_eos(file, config),
        notes=(*ignored_of_gguf(path, file.metadata), *notes),
        overrides=changed.overrides if changed is not None else (),
    )
    if changed is not None:
        changed.check_read("tokenizer.")  # these keys are read when the tokenizer is made
    return checkpoint


def _generation_file(file: Path, config: ModelConfig) -> tuple[dict[str, Any], tuple[str, ...], tuple[int, ...]]:
    """The defaults of a generation_config.json, its settings that are not supported, and the end tokens that it
    names."""
    if not file.is_file():
        return {}, (), ()
    values = read_json(file)
    ends = Fields(file, values).token_ids("eos_token_id", config.vocab_size)
    return generation_from_json(file, values, config.vocab_size), ignored_of_json(file, values), ends


def _gguf_eos(file: GGUFFile, config: ModelConfig) -> tuple[int, ...]:
    keys = Fields(file.path, file.metadata, "tokenizer.ggml.")
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [keys.integer(name, low=0, high=config.vocab_size - 1) for name in names if keys.get(name) is not None]
    return tuple(dict.fromkeys(ids))


def _bounded(path: Path, template: str | None) -> str | None:
    if template is not None and len(template) > MAX_TEMPLATE:
        raise ModelError(f"{path}: a chat template of {len(template)} characters; at most {MAX_TEMPLATE} are allowed")
    return template


# --- a directory -------------------------------------------------------------------------------------------------


def _open_directory(path: Path) -> Checkpoint:
    from unspool.weights.fp8_scales import own_scales
    from unspool.weights.mxfp4_blocks import join_blocks
    from unspool.weights.safetensors import open_safetensors_directory

    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        hint = f"did you mean {files[0]}?" if files else "a model is a directory that has one, or a GGUF file"
        raise ModelError(f"{path} holds no config.json; {hint}")
    values = read_json(path / "config.json")
    config = config_from_json(path / "config.json", values)
    fields = Fields(path / "config.json", values)
    text = fields if fields.get("eos_token_id") is not None else fields.object("text_config") or fields
    ids = text.token_ids("eos_token_id", config.vocab_size)
    generation, notes, more_ids = _generation_file(path / "generation_config.json", config)

    def tokenizer() -> Tokenizer:
        from unspool.text.tokenizer import from_directory

        return from_directory(path)

    templates = _directory_templates(path)
    tensors = join_blocks(own_scales(open_safetensors_directory(path)))
    return Checkpoint(
        path=path,
        name=model_name(path),
        config=config,
        weights=canonical_weights(tensors, config),
        draft_weights=lambda: canonical_draft_weights(tensors, config),
        tokenizer=tokenizer,
        chat_template=_bounded(path, templates.get("default")),
        tool_template=_bounded(path, templates.get("tool_use")),
        generation=generation,
        eos_ids=tuple(dict.fromkeys((*ids, *more_ids))),
        notes=notes,
    )


def model_name(path: Path) -> str:
    """The name of a file or directory; for a snapshot of the hub (models--org--name/snapshots/revision), the hub's
    name."""
    if not path.is_dir():
        return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    resolved = path.resolve()
    if resolved.parent.name == "snapshots" and resolved.parent.parent.name.startswith("models--"):
        return resolved.parent.parent.name.removeprefix("models--").replace("--", "/")
    return resolved.name


def _directory_templates(path: Path) -> dict[str, str]:
    """The chat templates by name: "default", and possibly "tool_use". They are read from separate files, or from the
    tokenizer's configuration (one template, or several by name)."""
    files = {"default": path / "chat_template.jinja", "tool_use": path / "additional_chat_templates" / "tool_use.jinja"}
    named = {name: _read_template(file) for name, file in files.items() if file.is_file()}
    for file in (path / "tokenizer_config.json", path / "chat_template.json"):
        if "default" not in named and file.is_file():
            named = _named_templates(Fields(file, read_json(file))) | named
    return named


def _read_template(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > 4 * MAX_TEMPLATE:
            raise ModelError(f"{file}: {size} bytes; a template has at most {MAX_TEMPLATE} characters")
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


def _named_templates(fields: Fields) -> dict[str, str]:
    value = fields.get("chat_template")
    if value is None:
        return {}
    templates = value if isinstance(value, list) else [{"name": "default", "template": fields.string("chat_template")}]
    if not all(
        isinstance(each, dict) and is_text(each.get("name")) and is_text(each.get("template")) for each in templates
    ):
        fields.fail("chat_template", "a string, or a list of objects with a name and a template, was expected")
    return {each["name"]: each["template"] for each in templates}
