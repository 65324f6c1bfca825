"""OpenVINO's graph of a GGUF file, with the file's own minima: `python exact_openvino.py SOURCE TARGET`.

OpenVINO's reader has whole codes for zero points: it rounds each block's minimum to a multiple of the block's scale.
Here its graph gets those zero points that the file stands for, as float16. Nothing else is changed: codes, scales and
all other weights are as it read them. SOURCE is the folder that `benchmarks.export` writes.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def zero_points(codes: NDArray[Any], scales: NDArray[Any], weight: NDArray[Any]) -> Floats | None:
    """What makes scale · (code - zero point) the weight. codes: [rows, blocks, values], scales: [rows, blocks, 1].

    None where nothing does: the codes are another weight's.
    """
    factors = scales.astype(np.float64)
    scaled, whole = factors * codes, weight.reshape(codes.shape).astype(np.float64)
    minima = (whole - scaled).mean(axis=-1, keepdims=True)
    largest = np.abs(whole).max()
    if np.abs(scaled + minima - whole).max() > 1e-6 * largest:
        return None
    if np.abs(minima[factors == 0]).max(initial=0) > 1e-6 * largest:
        raise ValueError("a block has a minimum but no scale: no zero point stands for that")
    return -minima / np.where(factors == 0, 1, factors)


def in_halves(weight: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of heads whose channels are rotated in pairs side by side, in the order of those rotated half by half."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return heads.swapaxes(1, 2).reshape(weight.shape)


def orders(
    weights: dict[str, NDArray[Any]], shape: tuple[int, int], head_dim: int
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Every weight of a shape, in the order of its file and in the one that OpenVINO gives to queries and keys."""
    for name, weight in weights.items():
        if weight.shape == shape:
            yield name, weight
            if shape[0] % head_dim == 0:
                yield name, in_halves(weight, head_dim)


def find(
    codes: NDArray[Any], scales: NDArray[Any], weights: dict[str, NDArray[Any]], head_dim: int
) -> tuple[str, Floats]:
    """The weight that codes and scales are of, and its zero points."""
    rows, blocks, size = codes.shape
    for name, weight in orders(weights, (rows, blocks * size), head_dim):
        if zero_points(codes[:1], scales[:1], weight[:1]) is not None:
            found = zero_points(codes, scales, weight)
            if found is not None:
                return name, found
    raise ValueError(f"no weight of the file has the codes of a {rows} x {blocks * size} matrix in OpenVINO's graph")


def convert(source: Path, target: Path) -> None:
    import openvino
    import openvino_genai
    from openvino import opset13 as operations

    if not (source / "model.gguf").exists():
        raise ValueError("OpenVINO's reader is one of GGUF files, and this model is none")
    openvino_genai.LLMPipeline(str(source / "model.gguf"), "CPU", enable_save_ov_model=True)  # beside the file
    head_dim = json.loads((source / "config.json").read_text())["head_dim"]
    weights = dict(np.load(source / "weights.npz"))
    model = openvino.Core().read_model(source / "openvino_model.xml")
    count = 0
    for node in [node for node in model.get_ops() if node.get_type_name() == "Subtract"]:
        sources = [node.input_value(i).get_node() for i in range(2)]
        if any(part.get_type_name() != "Convert" for part in sources):
            continue
        codes, points = (part.input_value(0).get_node() for part in sources)
        if codes.get_element_type() != openvino.Type.u4 or points.get_element_type() != openvino.Type.u4:
            continue
        (product,) = (reader.get_node() for reader in node.output(0).get_target_inputs())
        scales = product.input_value(1).get_node().data
        name, found = find(unpacked(codes), scales, weights, head_dim)
        del weights[name]
        sources[1].output(0).replace(operations.constant(found.astype(np.float16)).output(0))
        count += 1
    if count == 0:
        raise ValueError("OpenVINO's graph of this file has no whole zero points: there is nothing to put back")
    model.validate_nodes_and_infer_types()
    target.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    for path in source.glob("openvino_*tokenizer.*"):
        shutil.copy(path, target)
    print(f"{count} matrices have their own minima again")


def unpacked(constant: Any) -> NDArray[np.uint8]:
    """A constant's 4-bit codes, a byte each; of two in a byte the lower comes first."""
    packed = np.frombuffer(constant.data.tobytes(), np.uint8)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(-1)
    return codes[: np.prod(constant.shape)].reshape(constant.shape)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
