"""unspool models: what is here, and what to type after -m to use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from unspool.cli.parser import Parser


@dataclass(frozen=True)
class Model:
    name: str  # what -m takes
    bytes: int
    path: str


def main(argv: Sequence[str]) -> int:
    parser = Parser("models", "[--json]", "List the models that are here; the name is what -m takes.")
    parser.add_argument("--json", action="store_true", help="one array of objects: name, bytes, path")
    parser.add_common()
    namespace = parser.parse_args(argv)
    models = [*_own(), *_hub()]
    if namespace.json:
        import json

        print(json.dumps([asdict(model) for model in models]))
        return 0
    from unspool.cli.terminal import human_bytes, note

    if not models:
        note("no model is here yet; `unspool pull` fetches the default one")
    longest = max((len(model.name) for model in models), default=0)
    for model in models:
        print(f"{model.name:<{longest}}  {human_bytes(model.bytes):>8}  {model.path}")
    return 0


def _own() -> Iterator[Model]:
    from unspool.weights.store import DEFAULT, cache_dir, default_model_path

    default = default_model_path()
    for path in sorted(cache_dir().glob("*.gguf")):
        yield Model(DEFAULT if path == default else str(path), path.stat().st_size, str(path))


def _hub() -> Iterator[Model]:
    """The hub library's cache, as it lies on the disk: importing the library to ask would take a second."""
    import os

    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or Path(caches) / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for repository in sorted(cache.glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        for snapshot in sorted(repository.glob("snapshots/*")):
            files = [path for path in snapshot.rglob("*") if path.is_file()]
            whole = [path for path in files if path.suffix == ".safetensors"]
            if whole and (snapshot / "config.json").exists():
                yield Model(name, sum(path.stat().st_size for path in whole), str(snapshot))
            for path in sorted(path for path in files if path.suffix == ".gguf"):
                yield Model(f"{name}:{path.relative_to(snapshot)}", path.stat().st_size, str(path))
