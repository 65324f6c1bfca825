"""Replicas as processes of this machine: real processes, killed and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.server.harness import PATIENCE
from unspool.cluster.local import LocalTransport
from unspool.cluster.models import ModelSource, open_source, resolver
from unspool.cluster.pool import Patience, ReplicaPool
from unspool.engine.driver import Submission
from unspool.errors import EngineError
from unspool.events import Event, Failed, Finished, Text
from unspool.params import SamplingParams

SOURCE = ModelSource(random="tiny", options={"threads": 1, "kv_tokens": 4096})
PROMPT = tuple(range(40, 90))


class Client:
    """Asks a pool and waits for the answers."""

    def __init__(self, pool: ReplicaPool) -> None:
        self.pool = pool

    async def ask(self, params: SamplingParams) -> tuple[str, list[int], str]:
        text, tokens, done = [], [], asyncio.get_running_loop().create_future()

        def receive(event: Event) -> None:
            if isinstance(event, Text):
                text.append(event.text)
                tokens.extend(token.id for token in event.tokens)
            elif not done.done():
                done.set_result(event)

        await self.pool.start_async([Submission(PROMPT, params, receive)])
        ending = await done
        if isinstance(ending, Failed):
            raise ending.error
        assert isinstance(ending, Finished)
        return "".join(text), tokens, ending.reason


async def started(replicas: int, silence: float = PATIENCE) -> tuple[LocalTransport, Client]:
    transport = LocalTransport(SOURCE, [None] * replicas, silence=silence)
    status = await transport.start(open_source(SOURCE).fingerprint)
    # On a busy machine a replica that is well may be silent, and counts as lost, more often than we disturb it.
    pool = ReplicaPool(transport, status, resolver(open_source(SOURCE), ()), Patience(attempts=1000, seconds=PATIENCE))
    async with asyncio.timeout(PATIENCE):
        while len(transport.statuses()) < replicas:
            await asyncio.sleep(0.05)
    return transport, Client(pool)


def asked(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=300, temperature=1.1, seed=seed, ignore_eos=True)


def test_answers_survive_replicas_that_are_killed_and_stopped() -> None:
    async def check() -> None:
        transport, client = await started(2, silence=3.0)
        try:
            calm = [await client.ask(asked(seed)) for seed in range(12)]

            async def disturb() -> None:
                for number, kind in ((0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL)):
                    await asyncio.sleep(0.4)
                    process = transport.places[number].process
                    if process is not None and process.returncode is None:
                        os.kill(process.pid, kind)

            disturbing = asyncio.create_task(disturb())
            answers = [asyncio.create_task(client.ask(asked(seed % 12))) for seed in range(48)]
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.gather(*answers) == [calm[seed % 12] for seed in range(48)]
                await disturbing
                while len(transport.statuses()) < 2:  # those that were killed and stopped are replaced
                    await asyncio.sleep(0.1)
            assert max(place.num_starts for place in transport.places) >= 2
        finally:
            await client.pool.shutdown()

    asyncio.run(check())


def test_equal_prompts_go_to_the_replica_that_has_them() -> None:
    async def check() -> None:
        transport, client = await started(2)
        try:
            for seed in range(6):
                await client.ask(asked(seed))
            loads: list[float] = []
            while sum(loads) < 6 * len(PROMPT):  # until the replicas have been asked again
                await asyncio.sleep(0.05)
                loads = [status.stats["prefix_queries"] for status in transport.statuses().values()]
            assert sorted(loads) == [0, 6 * len(PROMPT)], "one replica had all of them"
        finally:
            await client.pool.shutdown()

    asyncio.run(check())


def test_a_model_that_cannot_be_loaded_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"no model")

    async def check() -> None:
        transport = LocalTransport(ModelSource(str(bad)), [None, None])
        with pytest.raises(EngineError, match="replica-0 could not start; it ended with status 3"):
            await transport.start("")

    asyncio.run(check())
    assert capfd.readouterr().err.count("bad.gguf") == 1


def test_nothing_is_left_behind() -> None:
    async def check() -> list[int]:
        transport, client = await started(2)
        pids = [place.process.pid for place in transport.places if place.process is not None]
        socket = transport.places[0].socket
        assert socket is not None
        folder = socket.parent
        assert folder.exists()
        await client.pool.shutdown()
        assert not folder.exists()
        return pids

    for pid in asyncio.run(check()):
        assert not Path(f"/proc/{pid}").exists()


def test_a_process_ends_with_its_parent() -> None:
    async def check() -> None:
        transport, client = await started(1)
        process = transport.places[0].process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()  # what the kernel does when the parent is killed
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0
        await client.pool.shutdown()

    asyncio.run(check())
