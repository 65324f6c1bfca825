"""What the prefix cache holds, published for routers of other projects: vLLM's KV-cache events over ZeroMQ.

A PUB socket sends messages of three frames: the topic, a sequence number (8 bytes, big-endian), and a MessagePack array
`[time, events, 0]`; the 0 is vLLM's number of a data-parallel rank. An event is a map whose `type` is BlockStored
(`block_hashes`, `parent_block_hash`, `token_ids`, `block_size`, `lora_id`, `medium`, `lora_name`) or BlockRemoved
(`block_hashes`, `medium`), as vLLM writes it since June 2026; before, events were arrays. A ROUTER socket sends past
messages again: a request is the first sequence number that is wanted, and the answer ends with the number -1.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unspool.cluster.prefixes import KEY_BYTES
from unspool.errors import BackendError, RequestError

if TYPE_CHECKING:
    from unspool.llm import LLM

MAX_PENDING = 100_000  # events that wait for the publishing thread; more are dropped and counted
MAX_REPLAY = 10_000  # messages that can be asked for again
GATHER_SECONDS = 0.01  # events of so long a time go out together
RANK = 0
END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True)
class Address:
    """Where events are published and where past ones are asked for."""

    events: str  # as in tcp://*:5557
    replay: str | None = None
    topic: str = ""


class Publisher:
    """Listens to a prefix cache and publishes its events from a thread of its own."""

    def __init__(self, address: Address, block_size: int, medium: str) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            raise BackendError(f"KV-cache events need {error.name}: pip install 'unspool[kv-events]'") from error
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._topic = address.topic.encode()
        self._block_size, self._medium = block_size, medium
        self._known: set[bytes] = set()  # keys that were published and not removed
        self._pending: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_REPLAY)
        self._number = 0
        self.num_lost = 0
        try:
            self._events = self._bound(zmq.PUB, address.events)
            self._replays = None if address.replay is None else self._bound(zmq.ROUTER, address.replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RequestError(
                f"KV-cache events cannot be published at {address.events}: {error}", "kv_events"
            ) from error
        self._thread = threading.Thread(target=self._run, name="unspool-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, address: str) -> Any:
        socket = self._context.socket(kind)
        socket.bind(address)
        return socket

    # In the engine's thread -----------------------------------------------------------------------------------------
    def stored(self, key: bytes, parent: bytes, tokens: Sequence[int]) -> None:
        self._known.add(key)
        self._put(
            {
                "type": "BlockStored",
                "block_hashes": [_number_of(key)],
                "parent_block_hash": _number_of(parent) if parent in self._known else None,
                "token_ids": list(tokens),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": self._medium,
                "lora_name": None,
            }
        )

    def removed(self, key: bytes) -> None:
        self._known.discard(key)
        self._put({"type": "BlockRemoved", "block_hashes": [_number_of(key)], "medium": self._medium})

    def _put(self, event: dict[str, Any]) -> None:
        if self._pending.qsize() >= MAX_PENDING:
            self.num_lost += 1
            return
        self._pending.put(event)

    # In its own thread ----------------------------------------------------------------------------------------------
    def _run(self) -> None:
        is_open = True
        while is_open:
            events: list[dict[str, Any]] = []
            try:
                event = self._pending.get(timeout=GATHER_SECONDS)
                while event is not None:
                    events.append(event)
                    event = self._pending.get_nowait()
                is_open = False
            except queue.Empty:
                pass
            if events:
                self._publish(events)
            if self._replays is not None and self._replays.poll(0):
                self._send_again(self._replays)
        self._context.destroy(linger=100)

    def _publish(self, events: list[dict[str, Any]]) -> None:
        number, payload = self._number.to_bytes(8, "big"), self._encode((time.time(), events, RANK))
        self._number += 1
        self._events.send_multipart((self._topic, number, payload))
        self._sent.append((number, payload))

    def _send_again(self, socket: Any) -> None:
        frames = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # not a request
        client, _, first = frames
        for number, payload in self._sent:
            if number >= first:
                socket.send_multipart((client, b"", number, payload))
        socket.send_multipart((client, b"", END, b""))

    def close(self) -> None:
        self._pending.put(None)
        self._thread.join()


def publish(llm: LLM, address: Address) -> Publisher:
    """Publish a model's cache events from now on. Close the publisher after the model."""
    engine = llm.engine
    publisher = Publisher(address, engine.config.block_size, "GPU" if engine.ops.name == "cuda" else "CPU")

    def listen(engine: Any) -> None:
        engine.scheduler.blocks.listener = publisher

    llm.driver.call(listen)
    return publisher


def _number_of(key: bytes) -> int:
    """A block's key as these events have it: an integer of 64 bits."""
    return int.from_bytes(key[:KEY_BYTES], "big")
