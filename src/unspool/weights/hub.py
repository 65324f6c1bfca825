"""Models on the Hugging Face hub, stored in the hub library's own cache, which other programs share."""

from __future__ import annotations

import re
from pathlib import Path

from unspool.errors import ModelError
from unspool.weights.fields import read_json
from unspool.weights.packaged import Progress

# Only files that cannot run code: weights and text, never a pickle.
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "tiktoken.model"]
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")
TIMEOUT_SECONDS = 20.0
PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")


def find(repository: str, wanted: str | None) -> Path | None:
    """The result of an earlier fetch if it is complete; the hub is not contacted."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = Path(snapshot_download(repository, local_files_only=True, allow_patterns=PATTERNS))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelError(f"{repository} is not a name that the hub could hold: {error}") from error
    if wanted is None:
        return snapshot if _is_whole(snapshot) else None
    files = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf") if path.exists()]
    chosen = [] if not files else _choose(files, wanted)[0]
    if not chosen:
        return None
    part = PART.search(chosen[0])
    return snapshot / chosen[0] if len(chosen) == (int(part[2]) if part else 1) else None


def _is_whole(snapshot: Path) -> bool:
    index = snapshot / "model.safetensors.index.json"
    if not (snapshot / "config.json").exists() or not any((snapshot / name).exists() for name in TOKENIZERS):
        return False
    if not index.exists():
        return any(snapshot.glob("*.safetensors"))
    files = read_json(index).get("weight_map")
    return isinstance(files, dict) and all((snapshot / str(file)).exists() for file in files.values())


def fetch(repository: str, wanted: str | None, progress: Progress | None) -> Path:
    """The repository's directory, or one GGUF file of it."""
    import huggingface_hub

    report = progress or (lambda what, done, total: None)
    report(repository, 0, None)
    try:
        info = huggingface_hub.HfApi().model_info(repository, timeout=TIMEOUT_SECONDS)
        names = [sibling.rfilename for sibling in info.siblings or []]
        if wanted is None and "config.json" in names and any(name.endswith(".safetensors") for name in names):
            return Path(huggingface_hub.snapshot_download(repository, revision=info.sha, allow_patterns=PATTERNS))
        chosen = choose_gguf(repository, names, wanted)
        paths = []
        for index, file in enumerate(chosen):
            report(f"{repository}: {file}", index, len(chosen))
            paths.append(Path(huggingface_hub.hf_hub_download(repository, file, revision=info.sha)))
        return paths[0]
    except ModelError:
        raise
    except Exception as error:  # the library's HTTP stack and its exceptions change between versions
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"{repository} cannot be fetched from the hub: {reason[0] if reason else type(error).__name__}; "
            "check the name and the network, or give a file or directory"
        ) from error


def choose_gguf(repository: str, names: list[str], wanted: str | None) -> list[str]:
    """The GGUF file that `wanted` names, in full or by its quantization ("Q4_K_M"); for a split file, all its parts."""
    files = [name for name in names if name.endswith(".gguf")]
    if not files:
        raise ModelError(f"{repository} holds neither safetensors with a config.json nor a GGUF file")
    chosen, known = _choose(files, wanted)
    if not chosen:
        problem = f"{len(known)} GGUF files are there" if wanted is None else f"{wanted!r} does not name one GGUF file"
        raise ModelError(f"{repository}: {problem}; name one as {repository}:FILE from {', '.join(known)}")
    return chosen


def _choose(files: list[str], wanted: str | None) -> tuple[list[str], list[str]]:
    """(the parts of the one model that matches, or nothing; the available models)."""
    models: dict[str, list[str]] = {}
    for name in sorted(files):
        models.setdefault(PART.sub("", name), []).append(name)
    matching = list(models)
    if wanted is not None:
        # Q4 does not match Q4_K_M: an underscore may precede the quantization's name but not follow it
        word = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-./]|$)", re.IGNORECASE)
        exact = [model for model, parts in models.items() if wanted in (model, Path(model).name, *parts)]
        matching = exact or [model for model in models if word.search(model)]
    return (models[matching[0]] if len(matching) == 1 else []), list(models)
