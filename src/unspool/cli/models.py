"""unspool models: the downloaded models, with the names for -m."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.cli.parser import Parser


def make_parser() -> Parser:
    parser = Parser("models", "[--supported] [--json]", "List the models that are here; the name is what -m takes.")
    parser.add_argument("--json", action="store_true", help="one array of objects: name, bytes, path")
    parser.add_argument("--supported", action="store_true", help="the families of models that can be run, instead")
    parser.add_common()
    return parser


def main(argv: Sequence[str]) -> int:
    namespace = make_parser().parse_args(argv)
    if namespace.supported:
        return print_supported(as_json=namespace.json)
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


def print_supported(*, as_json: bool) -> int:
    from unspool.models.support import supported

    if as_json:
        import json

        print(json.dumps([vars(each) for each in supported()]))
        return 0
    for each in supported():
        print(f"{each.family:<16}  {each.models}")
        print(f"{'':<16}  Hugging Face: {', '.join(each.classes) or 'none'}; GGUF: {', '.join(each.gguf)}")
    return 0
