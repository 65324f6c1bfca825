"""Files of API keys: what a line may hold, what is wrong is told by its number, and reading them again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.brake import Brake
from tests.server.harness import PATIENCE, Client, in_process, make_llm, wait_until
from tests.server.test_cli import Process
from unspool.errors import RequestError
from unspool.models.random import SHAPES, write_random_gguf
from unspool.server import keys
from unspool.server.config import ServerConfig
from unspool.server.host import host_of
from unspool.server.keys import MAX_KEYS, KeyRing, digest_of, read_keys
from unspool.server.quotas import Limits

BODY = {"prompt": "a", "max_tokens": 2}


def ring(path: Path, *given: str) -> KeyRing:
    return KeyRing(ServerConfig(api_keys=given, api_key_file=str(path), log_format="off"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_line_has_a_key_and_what_it_may_use(file: Path) -> None:
    file.write_text(
        "# ours\n"
        "sk-a\n\n"
        "  sk-b  name=bob  requests_per_minute=60 tokens_per_minute=20000\tconcurrent_requests=4\n"
        "sk-#c name=c\n"
    )
    read = read_keys(file)
    assert [(key.digest, key.name) for key in read] == [
        (digest_of("sk-a"), None), (digest_of("sk-b"), "bob"), (digest_of("sk-#c"), "c")
    ]  # fmt: skip
    assert [key.limits for key in read] == [Limits(), Limits(60, 20_000, 4), Limits()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# none\n", "holds no key; a server that it guards would be open"),
        ("sk-a\nsk-b requests_per_minute=0\n", "line 2: requests_per_minute is '0'; allowed: a whole number from 1"),
        ("sk-a tokens_per_minute=1.5\n", "line 1: tokens_per_minute is '1.5'; allowed: a whole number"),
        ("sk-a tokens_per_minute=\n", "line 1: tokens_per_minute is ''; allowed: a whole number"),
        ("sk-a requests_per_minutes=5\n", "line 1: word 2 is no option of a key; did you mean 'requests_per_minute'?"),
        ("sk-a name=x name=y\n", "line 1: name is given twice"),
        ("sk-a name=-x\n", "line 1: name is '-x'; allowed: up to 64 of"),
        ("sk-a name=unnamed\n", "line 1: name is 'unnamed', which is what keys without a name are called"),
        ("\n\nsk-a\n#\nsk-a\n", "line 5: this key is in an earlier line too"),
        ("sk-a name=x\nsk-b name=x requests_per_minute=5\n", "line 2: 'x' has other limits in line 1"),
        ("sk-ä\n", "line 1: the key has characters that no HTTP header can carry"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_by_its_line(file: Path, text: str, message: str) -> None:
    file.write_text(text, "utf-8")
    with pytest.raises(RequestError) as raised:
        read_keys(file)
    assert str(raised.value).startswith(str(file))
    assert message in str(raised.value)


def test_an_error_shows_no_part_of_a_key(file: Path) -> None:
    file.write_text("correct horse battery=staple\n")
    with pytest.raises(RequestError, match="line 1: word 2 is no option of a key") as raised:
        read_keys(file)
    assert not any(word in str(raised.value) for word in ("correct", "horse", "battery", "staple"))


def test_files_that_are_none(file: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        read_keys(file)
    file.write_bytes(b"sk-\xff\n")
    with pytest.raises(RequestError, match="it is not UTF-8"):
        read_keys(file)
    file.write_text("".join(f"sk-{number}\n" for number in range(MAX_KEYS + 1)))
    with pytest.raises(RequestError, match="line 10001: there are more than 10,000 keys"):
        read_keys(file)
    with pytest.raises(RequestError, match="empty"):
        ServerConfig(api_keys=(" ",))


def test_keys_are_matched_with_their_accounts(file: Path) -> None:
    file.write_text("sk-a name=ann\nsk-b\nsk-c name=ann\n")
    held = ring(file, "sk-given", "sk-b")
    found = {key: held.match(key) for key in ("sk-a", "sk-b", "sk-c", "sk-given")}
    assert all(found.values())
    assert found["sk-a"] is found["sk-c"], "keys of one name share an account"
    assert len({id(account) for account in found.values()}) == 3
    assert held.match("") is None
    assert held.match("sk-") is None
    assert not KeyRing(ServerConfig())
    assert KeyRing(ServerConfig()).match("") is None


async def until(true: object, ring: KeyRing) -> None:
    """Wait until a function of no arguments says so."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def test_a_file_that_changes_is_read_again(file: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    monkeypatch.setattr(keys, "WATCH_SECONDS", 0.01)
    file.write_text("sk-old name=ann requests_per_minute=5\n")

    async def test() -> None:
        held = ring(file)
        watching = asyncio.create_task(held.watch())
        account = held.match("sk-old")
        assert account is not None
        account.admit(1)
        replacement = file.with_name("new")
        replacement.write_text("sk-new name=ann requests_per_minute=7\n")
        os.replace(replacement, file)
        await until(lambda: held.match("sk-new"), held)
        assert held.match("sk-old") is None
        assert held.match("sk-new") is account, "what the name has used stays"
        assert dict(account.headers("/"))[b"x-ratelimit-remaining-requests"] == b"6"

        file.write_text("sk-newer\nsk-newest tokens=5\n")
        await until(lambda: "line 2" in str(said), held)
        assert held.match("sk-new") is account
        assert held.match("sk-newer") is None
        await asyncio.sleep(0.1)  # several looks
        file.unlink()
        await until(lambda: "No such file" in str(said), held)
        assert held.match("sk-new") is account
        assert sample(held, "unspool:api_key_file_valid") == 0
        file.write_text("sk-newest\n")
        await until(lambda: held.match("sk-newest"), held)
        assert sample(held, "unspool:api_key_file_valid") == 1
        watching.cancel()

    asyncio.run(test())
    assert len([line for line in said if "stay in force" in line]) == 2, "one line for each bad file"
    assert f"{file}, line 2: word 2 is no option" in said[1]
    assert said[1].endswith("the 1 keys from before stay in force")
    assert "sk-" not in str(said)


def sample(held: KeyRing, name: str) -> float:
    return next(one.value for metric in held.collect() for one in metric.samples if one.name == name)


def test_a_bad_file_leaves_requests_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "WATCH_SECONDS", 0.01)
    file.write_text("sk-a\n")
    llm = make_llm()
    brake = Brake(llm.engine)

    async def test(client: Client) -> None:
        held = host_of(client.service).keys
        watching = asyncio.create_task(held.watch())
        running = asyncio.create_task(
            client.post("/v1/completions", {**BODY, "max_tokens": 200, "ignore_eos": True}, headers=bearer("sk-a"))
        )
        await until(lambda: llm.driver.num_open, held)
        file.write_text("sk-b\n")
        held.ask()
        await until(lambda: held.match("sk-b"), held)
        brake.release()
        assert (await client.post("/v1/completions", BODY, headers=bearer("sk-a"))).status_code == 401
        assert (await client.post("/v1/completions", BODY, headers=bearer("sk-b"))).status_code == 200
        done = await running  # under way when its key went
        assert done.json()["usage"]["completion_tokens"] == 200
        watching.cancel()

    in_process(test, ServerConfig(api_key_file=str(file), log_format="off"), llm)


def test_a_process_reads_its_keys_again_on_sighup(tmp_path: Path, file: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_random_gguf(model, SHAPES["tiny"])
    file.write_text("sk-a name=ann\n")
    server = Process("-m", str(model), "--drain", "0", "--api-key-file", str(file))
    url = f"http://127.0.0.1:{server.port}/v1/models"
    assert httpx.get(url, headers=bearer("sk-a"), timeout=PATIENCE).status_code == 200
    before = file.stat()
    file.write_text("sk-b name=bea\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # so that it does not see the change by itself
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: httpx.get(url, headers=bearer("sk-b"), timeout=PATIENCE).status_code == 200)
    assert httpx.get(url, headers=bearer("sk-a"), timeout=PATIENCE).status_code == 401
    code, said = server.stop()
    assert code == 0
    assert said.count("again: 1 keys") == 1
    assert "key=bea" in said
    assert "sk-" not in said
