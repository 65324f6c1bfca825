"""A replica process of this machine: loads a model and serves frames on a Unix socket until its parent is gone.

    python -m unspool.cluster.worker     the socket, the model and its options come as one line of JSON on stdin

The parent keeps stdin open. When it ends, however the parent ended, the process ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from unspool.cluster import numa, wire
from unspool.cluster.replica import Replica
from unspool.cluster.streams import ASK_ABORT, ASK_STATUS, read_frame, write_frame
from unspool.errors import EngineError, UnspoolError

READY = b"ready\n"


def main() -> int:
    asked = json.loads(sys.stdin.buffer.readline())
    if asked["node"] is not None:
        numa.bind(numa.Node(**asked["node"]))  # before the model is loaded, so that its memory comes from there
    from unspool.cluster.back import load_replica
    from unspool.cluster.models import ModelSource

    try:
        replica = load_replica(asked["name"], ModelSource(**asked["source"]), asked["options"])
    except UnspoolError as error:
        print(f"unspool: {error}", file=sys.stderr)
        return 3
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C in a terminal reaches every process: the parent decides
        asyncio.run(_serve(replica, Path(asked["socket"])))
    os._exit(0)  # whatever still computes, nobody waits for it


async def _serve(replica: Replica, path: Path) -> None:
    import signal

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await _answer(replica, reader, writer)
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    await _end_of_stdin()
    server.close()


async def _end_of_stdin() -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


async def _answer(replica: Replica, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = await read_frame(reader)
    if data == ASK_STATUS:
        await write_frame(writer, wire.dump(await replica.status()))
        return
    asked: Any = wire.load(data)
    if isinstance(asked, wire.PageRequest):
        await write_frame(writer, wire.dump(await replica.page(asked)))
        return
    listening = asyncio.create_task(_listen(replica, asked.id, reader))
    try:
        messages = replica.stream(data)
        async for message in messages:
            if listening.done():  # the pool closed the connection
                break
            await write_frame(writer, message)
        await messages.aclose()  # type: ignore[attr-defined]
    finally:
        listening.cancel()


async def _listen(replica: Replica, id: str, reader: asyncio.StreamReader) -> None:
    """Aborts that the pool sends, until it closes the connection."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            frame = await read_frame(reader)
            if not frame.startswith(ASK_ABORT):
                raise EngineError(f"an unknown frame {frame[:20]!r}")
            replica.abort(id, frame[len(ASK_ABORT) :].decode())  # type: ignore[arg-type]
    replica.abort(id, "abort")


if __name__ == "__main__":
    sys.exit(main())
