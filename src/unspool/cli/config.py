"""unspool config: names, aliases and the default model, in a small TOML file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli.parser import Parser, UsageError
from unspool.suggest import nearest

if TYPE_CHECKING:
    from unspool.user_config import UserConfig

DESCRIPTION = """\
Show or change the configuration file: short names for models, their aliases, and the model that commands take where -m
names none. A name stands wherever a model is named, in every command and in LLM("NAME")."""
EPILOG = """\
examples:
  unspool config                                          where the file is, and what it says
  unspool config add coder ~/models/coder.gguf --alias gpt-4o-mini
  unspool config default coder
  unspool config remove coder"""
ACTIONS = {"add": 2, "remove": 1, "default": 1, "path": 0}  # with the number of arguments


def main(argv: Sequence[str]) -> int:
    usage = "[add NAME MODEL [--alias NAME] | remove NAME | default NAME | path]"
    parser = Parser("config", usage, DESCRIPTION, EPILOG)
    parser.add_argument("action", nargs="?", metavar="ACTION", help="add, remove, default or path; without it, show")
    parser.add_argument("values", nargs="*", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--alias", action="append", default=[], metavar="NAME", help="of add: another name; repeatable")
    parser.add_argument("--json", action="store_true", help="show one object: path, default, models")
    parser.add_common()
    namespace = parser.parse_args(argv)
    action, values = namespace.action, namespace.values
    _check(action, values, namespace.alias)

    from unspool import user_config as files

    config = files.read_config()
    if action is None:
        _show(config, namespace.json)
    elif action == "path":
        print(config.path)
    else:
        text = config.path.read_text("utf-8") if config.path.exists() else ""
        if action == "add":
            name, model = values
            model = str(Path(model).resolve()) if Path(model).exists() else model  # the same from any directory
            text = files.with_model(config, text, files.NamedModel(name, model, tuple(namespace.alias)))
        elif action == "remove":
            text = files.without_model(config, text, values[0])
        else:
            text = files.with_default(config, text, values[0])
        _show(files.write_config(config, text), namespace.json)
    return 0


def _check(action: str | None, values: list[str], aliases: list[str]) -> None:
    if action is None:
        return
    if action not in ACTIONS:
        hint = nearest(action, ACTIONS, f"the actions are {', '.join(ACTIONS)}")
        raise UsageError(f"{action!r} is no action of config{hint}")
    if len(values) != ACTIONS[action]:
        wanted = {0: "no argument", 1: "NAME", 2: "NAME MODEL"}[ACTIONS[action]]
        raise UsageError(f"config {action} takes {wanted} (see unspool config --help)")
    if aliases and action != "add":
        raise UsageError("--alias goes with config add")


def _show(config: UserConfig, as_json: bool) -> None:
    if as_json:
        import json

        models = {each.name: {"model": each.model, "aliases": list(each.aliases)} for each in config.models.values()}
        print(json.dumps({"path": str(config.path), "default": config.default, "models": models}))
        return
    from unspool.cli.terminal import show

    show(f"{config.path}{'' if config.path.exists() else ' (there is no such file yet)'}")
    show(f"default  {config.default}")
    longest = max((len(name) for name in config.models), default=0)
    for each in config.models.values():
        also = f"  (also {', '.join(each.aliases)})" if each.aliases else ""
        show(f"{each.name:<{longest}}  {each.model}{also}")
