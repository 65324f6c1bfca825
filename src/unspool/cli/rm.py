"""unspool rm: delete downloaded models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unspool.cli.parser import Parser, UsageError
from unspool.suggest import nearest

if TYPE_CHECKING:
    from unspool.weights.installed import Installed

DESCRIPTION = """\
Delete models that were fetched: the default one, or what came from the hub, whose cache other programs share. Names are
those of `unspool models`; a repository's name stands for all of its files that are here. Files of your own are left
alone, and so are names of `unspool config`."""
EPILOG = """\
examples:
  unspool rm org/name
  unspool rm org/name:model-Q4_K_M.gguf --yes"""


def make_parser() -> Parser:
    parser = Parser("rm", "MODEL… [--yes]", DESCRIPTION, EPILOG)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a name that `unspool models` lists")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    from unspool.cli.terminal import human_bytes, note
    from unspool.weights.installed import installed, remove

    here = installed()
    chosen = list(dict.fromkeys(model for name in namespace.models for model in named(name, here)))
    for model in chosen:
        print(f"{model.name}  {human_bytes(model.bytes)}  {model.path}")
    if not namespace.yes and not _agreed():
        note("nothing was deleted")
        return 1
    for model in chosen:
        remove(model)
    note(f"deleted {human_bytes(sum(model.bytes for model in chosen))}")
    return 0


def named(name: str, here: Sequence[Installed]) -> list[Installed]:
    """The models that a name stands for."""
    found = [model for model in here if name in (model.name, model.path) or model.name.startswith(f"{name}:")]
    if found:
        return found
    from unspool.user_config import read_config

    config = read_config()
    meant = config.find(name)
    if meant is not None:
        raise UsageError(f"{name} is a name of {config.path}; `unspool config remove {meant.name}` removes the name")
    known = "`unspool models` lists those that were fetched"
    raise UsageError(f"{name} was not fetched{nearest(name, [model.name for model in here], known)}")


def _agreed() -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is here to ask; --yes deletes without asking")
    sys.stderr.write("Delete? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
