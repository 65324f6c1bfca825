"""A follower of the published events knows what the prefix cache holds."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from unspool import LLM
from unspool.cluster.kv_events import END, Address, Publisher, publish
from unspool.cluster.prefixes import prompt_chain
from unspool.errors import RequestError
from unspool.models.random import stand_in

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")
PROMPT = list(range(40, 140))


@pytest.fixture
def address() -> Iterator[Address]:
    """Of sockets that are files: a port that is free now may be another process's when it is bound."""
    with tempfile.TemporaryDirectory() as folder:  # a socket's path may have 107 characters
        yield Address(f"ipc://{folder}/events", f"ipc://{folder}/replay", topic="kv")


class Follower:
    """Reads everything that was published, through the replay socket."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 600_000)
        self._socket.connect(address)

    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self._received(0)]

    def messages(self, first: int = 0) -> list[dict[str, Any]]:
        found = []
        for number, payload in self._received(first):
            _, events, _ = msgspec.msgpack.decode(payload)
            found.append({"number": int.from_bytes(number, "big"), "events": events})
        return found

    def _received(self, first: int) -> list[tuple[bytes, bytes]]:
        self._socket.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            _, number, payload = self._socket.recv_multipart()
            if number == END:
                return found
            found.append((number, payload))

    def close(self) -> None:
        self._socket.close(linger=0)


def test_a_follower_knows_the_cache(address: Address) -> None:
    assert address.replay is not None
    with LLM(stand_in("tiny"), threads=1, kv_tokens=256, block_size=16) as llm:
        publisher = publish(llm, address)
        follower = Follower(address.replay)
        try:
            for start in range(6):  # more than the cache holds
                llm.generate([token + start for token in PROMPT], max_tokens=1)
            expected = {
                key.hex()[:16] for key in llm.driver.call(lambda engine: engine.scheduler.blocks.registered_keys(1000))
            }
            held: dict[int, Any] = {}
            while {f"{key:016x}" for key in held} != expected:
                held = {}
                for message in follower.messages():
                    for event in message["events"]:
                        if event["type"] == "BlockStored":
                            (key,) = event["block_hashes"]
                            held[key] = event
                        else:
                            (key,) = event["block_hashes"]
                            del held[key]
            messages = follower.messages()
            assert [message["number"] for message in messages] == list(range(len(messages)))
            assert follower.messages(len(messages) - 1) == messages[-1:]
        finally:
            follower.close()
        receipt, layout = llm.receipt(0), llm.engine.runner.kv.layout
        chain = prompt_chain(
            [token + 5 for token in PROMPT], model=receipt.model, layout=layout, salt=None, block_size=16
        )
        events = [held[int(key, 16)] for key in chain]
        assert [event["parent_block_hash"] for event in events] == [None, *(int(key, 16) for key in chain[:-1])]
        assert [token for event in events for token in event["token_ids"]] == [token + 5 for token in PROMPT[:96]]
        assert {(event["block_size"], event["medium"]) for event in events} == {(16, "CPU")}
    publisher.close()


def test_subscribers_get_events_as_they_come(address: Address) -> None:
    publisher = Publisher(address, 16, "CPU")
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.RCVTIMEO, 600_000)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"kv")
    subscriber.connect(address.events)
    try:
        while not subscriber.poll(50):  # a subscription takes a moment
            publisher.stored(b"k" * 16, b"r" * 16, [1, 2])
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b"kv"
        assert len(number) == 8
        assert msgspec.msgpack.decode(payload)[1][0]["token_ids"] == [1, 2]
    finally:
        subscriber.close(linger=0)
        publisher.close()


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's events, as its documentation declares them: maps, with the name of the class as `type`."""


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


def test_messages_are_those_of_vllm(address: Address) -> None:
    """Decoded by its schema, and byte for byte what its encoder makes of the same values."""
    publisher = Publisher(address, 16, "GPU")
    assert address.replay is not None
    follower = Follower(address.replay)
    try:
        publisher.stored(b"\xff" * 8, b"r" * 8, [1, 2])
        publisher.stored(b"\x00" * 7 + b"\x05", b"\xff" * 8, [70_000])
        publisher.removed(b"\xff" * 8)
        payloads: list[bytes] = []
        events: list[Event] = []
        while len(events) < 3:
            payloads = follower.payloads()
            events = [event for each in payloads for event in msgspec.msgpack.decode(each, type=Batch).events]
    finally:
        follower.close()
        publisher.close()
    assert events == [
        BlockStored([2**64 - 1], None, [1, 2], 16, None, "GPU", None),
        BlockStored([5], 2**64 - 1, [70_000], 16, None, "GPU", None),
        BlockRemoved([2**64 - 1], "GPU"),
    ]
    for payload in payloads:
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert batch.data_parallel_rank == 0
        assert msgspec.msgpack.encode(batch) == payload
        assert payload[0] == 0x93, "an array of three"


def test_an_address_in_use_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RequestError, match=rf"cannot be published at tcp://127\.0\.0\.1:{port}"):
            Publisher(Address(f"tcp://127.0.0.1:{port}"), 16, "CPU")
