"""A model that can be run: an architecture with its tensors, and the forward pass over its layers."""

from __future__ import annotations

import copy
from dataclasses import replace

from unspool.config import ModelConfig
from unspool.models.layers import Architecture, Place
from unspool.models.rotary import Rotary
from unspool.models.tensors import ShapeRecorder, TensorReader
from unspool.ops import Batch, KVCache, Rope, Rows


class Decoder:
    """Embedding, layers, norm, head."""

    def __init__(self, config: ModelConfig, architecture: Architecture, reader: TensorReader) -> None:
        self.config, self.architecture, self.ops = config, architecture, reader.ops
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        ropes: dict[Rotary, Rope] = {}
        self.embedding = reader.matrix(("token_embd.weight", vocabulary, hidden))
        rows, norm = architecture.num_positions, architecture.embedding_norm
        self.positions = None if rows is None else reader.matrix(("position_embd.weight", rows, hidden))
        self.embedding_norm = None if norm is None else norm.bind(reader, "token_embd_norm", hidden)
        inputs, count = architecture.token_inputs, len(architecture.layers)
        self.token_inputs = None if inputs is None else inputs.bind(reader, vocabulary, hidden, count)
        streams = architecture.streams
        self.streams = None if streams is None else streams.bind(reader, hidden)
        self.layers = [
            layer.bind(Place(reader, index, hidden, ropes=ropes)) for index, layer in enumerate(architecture.layers)
        ]
        self.norm = architecture.norm.bind(reader, architecture.norm_name, hidden)
        self.head = self.embedding
        if not architecture.tied_embeddings:
            self.head = reader.matrix(("output.weight", vocabulary, hidden))
        self.head_bias = reader.vector(("output.bias", vocabulary)) if architecture.head_bias else None
        reader.finish()

    def early(self, num_layers: int) -> Decoder:
        """The model's first layers, followed by its norm and head. Weights are shared."""
        cut = copy.copy(self)
        cut.config = replace(self.config, num_layers=num_layers)
        cut.architecture = replace(self.architecture, layers=self.architecture.layers[:num_layers])
        cut.layers = self.layers[:num_layers]
        return cut

    def __call__(self, batch: Batch, kv: KVCache) -> Rows:
        """Logits of the batch's logit rows."""
        model = self.architecture
        x = self.hidden(batch, kv)
        return self.ops.logits(x, self.head, model.logit_softcap, self.head_bias, model.logit_scale)

    def hidden(self, batch: Batch, kv: KVCache) -> Rows:
        """The logit rows after the last norm, which are the head's input."""
        return self._normed(self.ops.take(self._stream(batch, kv), batch))

    def with_hidden(self, batch: Batch, kv: KVCache) -> Rows:
        """The same logits, with the same bits; the hidden rows of all tokens are kept in addition."""
        ops, model = self.ops, self.architecture
        rows = self._normed(self._stream(batch, kv))
        logits = ops.logits(ops.take(rows, batch), self.head, model.logit_softcap, self.head_bias, model.logit_scale)
        return ops.keep(logits, rows)

    def _stream(self, batch: Batch, kv: KVCache) -> Rows:
        """The rows of all tokens after the last layer."""
        ops, model = self.ops, self.architecture
        x = ops.embed(batch, self.embedding, model.embedding_scale, self.positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x, None)
        inputs = None if self.token_inputs is None else self.token_inputs(x, batch)
        if self.streams is not None:
            x = self.streams[0](x)
        for layer in self.layers:
            x = layer(x, batch, kv, inputs)
        return x

    def _normed(self, x: Rows) -> Rows:
        """Rows of the stream, normed for the head."""
        return self.norm(x if self.streams is None else self.streams[1](x), None)


def tensor_shapes(config: ModelConfig, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this architecture has, by its canonical name."""
    recorder = ShapeRecorder()
    Decoder(config, architecture, recorder)
    return recorder.shapes
