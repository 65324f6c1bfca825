"""unspool models: what is here, and what to type after -m to use it."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser("models", "[--json]", "List the models that are here; the name is what -m takes.")
    parser.add_argument("--json", action="store_true", help="one array of objects: name, bytes, path")
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    from unspool.weights.installed import installed

    models = installed()
    if namespace.json:
        import json

        print(json.dumps([{"name": one.name, "bytes": one.bytes, "path": one.path} for one in models]))
        return 0
    from unspool.cli.terminal import human_bytes, note

    if not models:
        note("no model is here yet; `unspool pull` fetches the default one")
    longest = max((len(model.name) for model in models), default=0)
    for model in models:
        print(f"{model.name:<{longest}}  {human_bytes(model.bytes):>8}  {model.path}")
    return 0
