"""A checkpoint as float32 arrays and a JSON file, for the converters of engines that do not read its format."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from unspool.models.checkpoint import Checkpoint


def export(checkpoint: Checkpoint, folder: Path) -> None:
    """config.json has ModelConfig's fields, weights.npz the dequantized tensors by GGUF's names; where there is a
    model.gguf, it leads to the file itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if checkpoint.path.suffix == ".gguf":
        (folder / "model.gguf").symlink_to(checkpoint.path.resolve())
    (folder / "config.json").write_text(json.dumps(asdict(checkpoint.config)))
    arrays = {name: weight.dequantize().astype(np.float32) for name, weight in checkpoint.weights.items()}
    np.savez(folder / "weights.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub knows allow_pickle alone
