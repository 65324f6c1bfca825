"""The user's configuration file: short names for models, their aliases, and the model that commands take by default.

    default = "coder"

    [models.coder]
    model = "~/models/qwen2.5-coder-0.5b.gguf"    # whatever -m takes: a file, a directory, a hub id
    aliases = ["code", "gpt-4o-mini"]

    [models.coder.options]                        # what LLM() takes: EngineConfig's fields
    max_model_len = 4096
    chat_template = "coder.jinja"                 # beside this file

The file is `unspool/config.toml` in the configuration directory (XDG_CONFIG_HOME, ~/.config). A name or an alias stands
wherever a model is named; `./coder` means the file of that name. The default is for the command line and the server:
`LLM()` is the same model everywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NoReturn

from unspool.errors import ModelError, RequestError
from unspool.records import record
from unspool.suggest import nearest

# Compiled where they are used: most starts find no file.
NAME = r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}"
# A model's table, or one inside it.
HEADER = r"""\s*\[\s*models\s*\.\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*(?:\.[^\]]*)?\]"""
MAX_BYTES = 1 << 20
BUILT_IN = "smollm2"  # the default where the file names none


@record(frozen=True)
class NamedModel:
    """One model of the file: `model` is whatever -m takes."""

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # EngineConfig's; checked where they are used

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@record(frozen=True)
class UserConfig:
    """What the file says; everything is empty where there is no file."""

    path: Path
    default: str = BUILT_IN
    models: Mapping[str, NamedModel] = field(default_factory=dict)

    def find(self, name: str) -> NamedModel | None:
        """The model of this name or alias."""
        return next((each for each in self.models.values() if name in each.names), None)

    @property
    def names(self) -> list[str]:
        return [name for each in self.models.values() for name in each.names]


def config_path() -> Path:
    """Where the file is: a place, nothing more."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "unspool" / "config.toml"


def read_config(path: Path | None = None) -> UserConfig:
    """The user's configuration. A ModelError names the file and the key that is wrong."""
    path = path or config_path()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return UserConfig(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ModelError(f"{path} has more than {MAX_BYTES:,} bytes")
    return parse_config(path, content)


def parse_config(path: Path, content: bytes) -> UserConfig:
    import tomllib

    try:
        values = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ModelError(f"{path} is not TOML: {error}") from error
    _check_keys(path, "", values, ("default", "models"))
    tables = values.get("models", {})
    if not isinstance(tables, dict):
        _fail(path, "models", "tables were expected, as in [models.NAME]")
    models = {name: _model(path, name, table) for name, table in tables.items()}
    seen: dict[str, str] = {}
    for each in models.values():
        for name in each.names:
            if name in seen:
                _fail(path, f"models.{each.name}", f"{name!r} is a name of models.{seen[name]} already")
            seen[name] = each.name
    default = values.get("default", BUILT_IN)
    if not isinstance(default, str) or not default:
        _fail(path, "default", f"the name of a model was expected, not {default!r}")
    return UserConfig(path, default, models)


def _model(path: Path, name: str, table: Any) -> NamedModel:
    key = f"models.{name}"
    _check_name(path, key, name)
    if not isinstance(table, dict):
        _fail(path, key, f"a table was expected, as in [{key}]")
    _check_keys(path, f"{key}.", table, ("model", "aliases", "options"))
    model, aliases, options = table.get("model"), table.get("aliases", []), table.get("options", {})
    if not isinstance(options, dict):
        _fail(path, f"{key}.options", f"a table was expected, as in [{key}.options]")
    if not isinstance(model, str) or not model:
        _fail(path, f"{key}.model", "a file, a directory or a hub id was expected")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        _fail(path, f"{key}.aliases", "a list of names was expected")
    for alias in aliases:
        _check_name(path, f"{key}.aliases", alias)
    return NamedModel(name, model, tuple(aliases), options)


def _check_name(path: Path, key: str, name: str) -> None:
    if not re.fullmatch(NAME, name, re.ASCII):
        _fail(path, key, f"{name[:100]!r} is no name; letters, digits, and any of _ . : - after the first are")


def _check_keys(path: Path, prefix: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in table.keys() - set(known):
        hint = nearest(key, known, f"known: {', '.join(known)}")
        _fail(path, f"{prefix}{key}", f"this key is not known{hint}")


def _fail(path: Path, key: str, reason: str) -> NoReturn:
    raise ModelError(f"{path}: {key}: {reason}")


# Models by name -----------------------------------------------------------------------------------------------------
def model_of(name: str) -> str:
    """What a name of the file stands for; another name stands for itself."""
    found = read_config().find(name)
    return name if found is None else found.model


def default_model() -> str:
    """The model of commands that name none."""
    return read_config().default


# Changing the file --------------------------------------------------------------------------------------------------
# Lines are added and taken out, so that comments stay; what comes of it is read before it is written.
def with_model(config: UserConfig, text: str, new: NamedModel) -> str:
    """The file's text with a model more, or with another model under a name that it has."""
    text = without_model(config, text, new.name) if new.name in config.models else text
    key = new.name if re.fullmatch(r"[A-Za-z0-9_-]+", new.name) else _quoted(new.name)
    lines = [f"[models.{key}]", f"model = {_quoted(new.model)}"]
    if new.aliases:
        lines.append(f"aliases = [{', '.join(map(_quoted, new.aliases))}]")
    options = new.options or (config.models[new.name].options if new.name in config.models else {})
    if options:
        lines += ["", f"[models.{key}.options]", *(f"{name} = {_written(value)}" for name, value in options.items())]
    return f"{text.rstrip()}\n\n".lstrip() + "\n".join(lines) + "\n"


def without_model(config: UserConfig, text: str, name: str) -> str:
    if name not in config.models:
        raise RequestError(f"{config.path} has no model {name!r}", "name")
    kept, is_inside = [], False
    for line in text.splitlines(keepends=True):
        header = re.match(HEADER, line)
        if re.match(r"\s*\[", line):
            is_inside = header is not None and name in header.groups()
        if not is_inside:
            kept.append(line)
    return "".join(kept)


def with_default(config: UserConfig, text: str, name: str) -> str:
    line = f"default = {_quoted(name)}\n"
    head, found, tables = text.partition("\n[") if not text.startswith("[") else ("", "[", text[1:])
    rest = [each for each in head.splitlines(keepends=True) if not re.match(r"\s*default\s*=", each)]
    return line + "".join(rest) + found + tables


def write_config(config: UserConfig, text: str) -> UserConfig:
    """Write a new text, which must be right; whoever reads meanwhile finds the old file or the new one."""
    changed = parse_config(config.path, text.encode())
    config.path.parent.mkdir(parents=True, exist_ok=True)
    fresh = config.path.with_name(f".{config.path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        os.replace(fresh, config.path)
    finally:
        fresh.unlink(missing_ok=True)
    return changed


def _quoted(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)  # JSON's strings are TOML's


def _written(value: Any) -> str:
    """A value of an options table: TOML's lists, numbers and truth values are JSON's, its tables are not."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(key)} = {_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    import json

    return json.dumps(value, ensure_ascii=False)
