"""From the options of `unspool serve` to the models that it serves."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unspool.cli.parser import UsageError
from unspool.errors import ModelError, RequestError, UnspoolError
from unspool.options import configured_options
from unspool.user_config import default_model, read_config

if TYPE_CHECKING:
    from unspool.server.config import ServerConfig
    from unspool.server.host import ModelHost
    from unspool.server.hosted import ModelSpec

SHARE = 0.9  # of the free memory, for all models together, without --memory
OF_ONE = ("chat_template", "rope_scaling", "rope_theta", "override_kv")  # options that apply to a single model only
LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def model_specs(namespace: Namespace, options: dict[str, Any]) -> list[ModelSpec]:
    """The requested models, each with its names."""
    from unspool.server.hosted import ModelSpec

    if namespace.random is not None:
        if namespace.model:
            raise UsageError("--random and -m both say what is served; give one")
        from unspool.models.random import stand_in_name

        names = tuple(dict.fromkeys((*namespace.name, stand_in_name(namespace.random))))
        return [ModelSpec(names, names[0], namespace.random, options)]
    specs = []
    for given in namespace.model or [default_model()]:
        path = Path(given).expanduser()
        if is_collection(path):
            specs += [ModelSpec(names_of(each), each, options=options) for each in models_in(path)]
        else:
            specs.append(ModelSpec(names_of(given), given, options={**configured_options(given), **options}))
    if namespace.name:
        if len(specs) > 1:
            raise UsageError("--name is for one model; `unspool config` names several")
        specs = [replace(specs[0], names=tuple(dict.fromkeys((*namespace.name, *specs[0].names))))]
    for name in OF_ONE:
        if len(specs) > 1 and options.get(name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for one model; the configuration file has options for each of several "
                "(docs/configuration.md)"
            )
    check_names(specs)
    return specs


def is_collection(path: Path) -> bool:
    """Whether a path is a directory of models, and not a model itself."""
    return path.is_dir() and not (path / "config.json").exists() and not _is_split(path)


def _is_split(path: Path) -> bool:
    """Whether a directory contains only the parts of one GGUF file."""
    files = sorted(path.glob("*.gguf"))
    return len(files) > 1 and len({re.sub(r"-\d{5}-of-\d{5}\.gguf$", "", file.name) for file in files}) == 1


def models_in(directory: Path) -> list[Path]:
    """The models in a directory: GGUF files, and directories with one model each."""
    found = []
    for path in sorted(directory.iterdir()):
        if path.is_dir() and (path / "config.json").is_file():
            found.append(path)
        elif path.is_dir():
            found += [file for file in sorted(path.glob("*.gguf")) if _is_model(file)]
        elif path.suffix == ".gguf" and _is_model(path):
            found.append(path)
    if not found:
        raise ModelError(f"{directory} holds no model: neither GGUF files nor directories with a config.json")
    return found


def _is_model(file: Path) -> bool:
    """Whether a GGUF file is a model by itself: the first part of a split one, and no projector of images."""
    return not LATER_PART.search(file.name) and not file.name.startswith("mmproj")


def names_of(model: str | Path) -> tuple[str, ...]:
    """The names of a model in requests: a path's file name; else the given name, and its names in the configuration."""
    path = Path(model).expanduser()
    if isinstance(model, Path) or path.exists():
        from unspool.models.checkpoint import model_name

        return (model_name(path),)
    known = read_config().find(model)
    return tuple(dict.fromkeys([model, *(known.names if known is not None else ())]))


def check_names(specs: list[ModelSpec]) -> None:
    """Refuse two models with the same name."""
    seen: dict[str, ModelSpec] = {}
    for spec in specs:
        for name in spec.names:
            if name in seen:
                both = f"{seen[name].source} and {spec.source}"
                raise UsageError(f"two models are called {name!r}: {both}; `unspool config` gives one another name")
            seen[name] = spec


def make_host(specs: list[ModelSpec], config: ServerConfig, memory: int | None) -> ModelHost:
    """A host of models that are loaded on demand. Local models are checked now, so that errors are reported at once: an
    error if none can be loaded, else a warning for each. A model that does not exist is an error."""
    import logging

    from unspool.server.host import ModelHost, too_large
    from unspool.server.hosted import HostedModel
    from unspool.weights.store import find

    budget = memory if memory is not None else default_budget(specs[0].options)
    host = ModelHost([HostedModel(spec, config) for spec in specs], config, budget)
    problems: list[UnspoolError] = []
    for model in host.models:
        if model.spec.random is None and find(model.spec.source) is None:
            continue  # it is downloaded on demand
        try:
            needs = model.examine(budget)
            if needs.memory > budget:
                problems.append(too_large(model, budget))
        except ModelError as error:
            problems.append(error)
    if len(problems) == len(specs):
        if isinstance(problems[0], ModelError):
            raise problems[0]
        raise RequestError("; ".join(map(str, problems)), "memory")
    for problem in problems:
        logging.getLogger("unspool.server").warning("%s", problem)
    return host


def default_budget(options: Any) -> int:
    """The default limit for all models together: most of the memory that is free now."""
    from unspool.config import EngineConfig
    from unspool.machine import free_memory
    from unspool.ops import uses_cuda

    config = EngineConfig(**options)
    if not uses_cuda(config):
        return int(SHARE * free_memory())
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(min(free, config.gpu_memory * total))
