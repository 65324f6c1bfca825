"""What the CUDA backend has no kernels for is refused by name, before anything is laid out."""

from __future__ import annotations

from collections.abc import Iterator

from unspool.errors import BackendError
from unspool.ops import AttentionSpec
from unspool.ops.graph import Attention, Embed, Gated, Graph, LayerNorm, Linear, Logits, Node

ACTIVATIONS = ("silu", "gelu_tanh")


def check_supported(graph: Graph) -> None:
    for node in graph.nodes:
        for what in _unsupported(node):
            raise BackendError(f"the CUDA backend does not support {what} yet; use device=\"cpu\"")
    kinds = {(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in _specs(graph)}
    if len(kinds) > 1:
        raise BackendError("the CUDA backend does not support layers whose heads differ yet; use device=\"cpu\"")


def _unsupported(node: Node) -> Iterator[str]:
    match node:
        case LayerNorm():
            yield "layer norms"
        case Embed() if node.positions is not None:
            yield "learned positions"
        case Linear() if node.activation is not None:
            yield "feed-forwards without a gate"
        case Linear() if node.scale != 1:
            yield "scaled residuals"
        case Gated() if node.bias is not None:
            yield "biases of gated feed-forwards"
        case Gated() if node.activation not in ACTIVATIONS:
            yield f"the activation {node.activation}"
        case Logits() if node.bias is not None or node.scale != 1:
            yield "biases and scales of logits"
        case Attention() if node.spec.sinks is not None or node.spec.growth or not node.spec.stores:
            yield "attention with sinks, growing queries or another layer's keys"


def _specs(graph: Graph) -> Iterator[AttentionSpec]:
    return (node.spec for node in graph.nodes if isinstance(node, Attention))
