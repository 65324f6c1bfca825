"""A draft head (multi-token prediction, MTP): a layer that some files have after a model's own layers. It was trained
to predict the token after the one that was just chosen.

At position p it reads the model's hidden row, and the embedding of the next token:

    x = W · [norm(embedding of token p + 1), norm(hidden row p)]      layer      norm      the model's head

To draft more than one token, it reads its own normed rows in place of the model's hidden rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from unspool.config import ModelConfig
from unspool.models.blocks import Norm, NormFunction, Place
from unspool.models.decoder import Decoder
from unspool.models.layers import Architecture, Layer
from unspool.models.tensors import ShapeRecorder, TensorReader
from unspool.ops import Batch, KVCache, Matrix, Rows
from unspool.ops.storage import Storage
from unspool.records import record

if TYPE_CHECKING:
    from unspool.weights.weight import Weight

# GGUF's names of the draft head's additional tensors, by Hugging Face's names within the layer.
NAMES = {
    "eh_proj.weight": "nextn.eh_proj.weight",
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "embed_tokens.weight": "nextn.embed_tokens.weight",
    "shared_head.head.weight": "nextn.shared_head_head.weight",
    "shared_head.norm.weight": "nextn.shared_head_norm.weight",
}


@record(frozen=True)
class DraftHead:
    """A draft head as data."""

    layer: Layer
    index: int  # of the layer in the file: the first after the model's own
    norm: Norm  # of both inputs, and of the output

    def tensor(self, name: str) -> str:
        return f"blk.{self.index}.nextn.{name}"

    def shapes(self, config: ModelConfig, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, without an embedding and a head of its own."""
        recorder = ShapeRecorder()
        HeadModel(self, Decoder(config, architecture, ShapeRecorder()), recorder)
        return recorder.shapes | {self.tensor("shared_head_norm.weight"): (architecture.hidden_size,)}


class HeadModel:
    """A draft head that can be run. It shares with the model what its file does not contain: the embedding, the last
    norm and the matrix of the logits."""

    def __init__(self, head: DraftHead, model: Decoder, reader: TensorReader) -> None:
        self.config, self.ops, self.architecture = model.config, model.ops, model.architecture
        vocabulary, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        self.hidden_size = hidden
        # The layer's cache entry has the layer's number, and all other entries are empty.
        own = Storage() if head.layer.mixer is None else head.layer.mixer.storage()
        self.storage = (*[Storage()] * head.index, own)

        def norm(name: str) -> NormFunction:
            return head.norm.bind(reader, head.tensor(name), hidden)

        def matrix(name: str, shared: Matrix) -> Matrix:
            tensor = head.tensor(f"{name}.weight")
            return reader.matrix((tensor, vocabulary, hidden)) if reader.has(tensor) else shared

        self._embedding_norm, self._hidden_norm = norm("enorm"), norm("hnorm")
        self._both = reader.matrix((head.tensor("eh_proj.weight"), hidden, 2 * hidden))
        self._layer = head.layer.bind(Place(reader, head.index, hidden))
        self._norm = norm("shared_head_norm") if reader.has(head.tensor("shared_head_norm.weight")) else model.norm
        self._embedding, self._head = matrix("embed_tokens", model.embedding), matrix("shared_head_head", model.head)
        self._head_bias = model.head_bias
        reader.finish()

    def __call__(self, batch: Batch, kv: KVCache) -> Rows:
        """Logits of the logit rows; the rows of all tokens after the last norm are kept in addition."""
        ops, model = self.ops, self.architecture
        embedded = self._embedding_norm(ops.embed(batch, self._embedding, model.embedding_scale), None)
        hidden = self._hidden_norm(ops.given(batch, self.hidden_size), None)
        x = self._layer(ops.linear(ops.join(embedded, hidden), self._both), batch, kv, None)
        rows = self._norm(x, None)
        logits = ops.logits(
            ops.take(rows, batch), self._head, model.logit_softcap, self._head_bias, model.logit_scale
        )
        return ops.keep(logits, rows)


def build_head(head: DraftHead, model: Decoder, weights: Mapping[str, Weight]) -> HeadModel:
    """Build a model's draft head; every one of `weights` must be used."""
    return HeadModel(head, model, TensorReader(model.ops, weights))
