"""unspool pull: download a model, or report that it is already downloaded."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.cli.parser import Parser
from unspool.user_config import default_model

DESCRIPTION = """\
Fetch a model and print its path. What is here already is not fetched again; a hub repository is asked for newer files.
  smollm2                 the default: SmolLM2-135M-Instruct, 93 MB, checked by its hash, kept in the cache directory
  org/name                a Hugging Face repository with safetensors, kept in the hub library's own cache
  org/name:Q4_K_M         one GGUF file of a repository, by its quantization or its name"""


def main(argv: Sequence[str]) -> int:
    parser = Parser("pull", "[MODEL]", DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=default_model(), help="the model (%(default)s)")
    parser.add_common()
    namespace = parser.parse_args(argv)

    from unspool.cli.terminal import ProgressBar
    from unspool.weights.store import pull

    progress = ProgressBar()
    try:
        path = pull(namespace.model, progress=progress)
    finally:
        progress.close()
    print(path)
    return 0
