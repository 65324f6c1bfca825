"""Frames over a stream of bytes: how pools and replica processes of one machine talk.

A frame is its length in four bytes and then so many bytes. A connection carries one request (the pool sends a request
and perhaps an abort, the replica sends messages) or asks for the status. Closing it ends the request.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

from unspool.cluster import wire
from unspool.errors import EngineError, ReplicaLostError
from unspool.events import FinishReason

MAX_FRAME = 256 << 20
ASK_STATUS, ASK_ABORT = b"status", b"abort "
SILENCE = 10.0  # seconds without a frame after which a replica counts as lost


async def write_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(struct.pack("<I", len(data)) + data)
    await writer.drain()


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame; asyncio.IncompleteReadError at the end of the connection."""
    (size,) = struct.unpack("<I", await reader.readexactly(4))
    if size > MAX_FRAME:
        raise EngineError(f"a frame of {size:,} bytes was announced; at most {MAX_FRAME:,} are taken")
    return await reader.readexactly(size)


class FrameStream:
    """A request on a replica that is reached through a socket."""

    def __init__(
        self, replica: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float = SILENCE
    ) -> None:
        self.replica = replica
        self._reader, self._writer, self._silence = reader, writer, silence

    def __aiter__(self) -> AsyncIterator[wire.Message]:
        return self

    async def __anext__(self) -> wire.Message:
        try:
            async with asyncio.timeout(self._silence):
                data = await read_frame(self._reader)
        except TimeoutError:
            raise ReplicaLostError(f"replica {self.replica} was silent for {self._silence:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ReplicaLostError(f"replica {self.replica} was lost: {error or type(error).__name__}") from None
        message: wire.Message = wire.load(data)
        return message

    async def abort(self, reason: FinishReason) -> None:
        try:
            await write_frame(self._writer, ASK_ABORT + reason.encode())
        except OSError as error:
            raise ReplicaLostError(f"replica {self.replica} was lost: {error}") from None

    async def close(self) -> None:
        self._writer.close()
