"""API keys: a file of them that is read again while the server runs, names and limits, comparison in constant time.

    # one key per line, followed by its name and limits
    sk-alice-1  name=alice  requests_per_minute=60  tokens_per_minute=20000  concurrent_requests=4
    sk-bob-1

No error and no log line contains any part of a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unspool.errors import RequestError
from unspool.records import record
from unspool.server.config import ServerConfig
from unspool.server.quotas import NO_LIMITS, Account, AccountCollector, KeyCounts, Limits
from unspool.suggest import nearest

log = logging.getLogger("unspool.server")
MAX_KEYS = 10_000  # every request is compared with all of them
MAX_LIMIT = 10**12
UNNAMED = "unnamed"  # what metrics call keys without a name
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,63}", re.ASCII)
KEY = re.compile(r"[\x21-\x7e]+")
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")
OPTIONS = ("name", *LIMITS)
WATCH_SECONDS = 1.0  # between two checks of the file; a change is applied when two of them saw the same


@record(frozen=True)
class Key:
    digest: bytes
    name: str | None = None
    limits: Limits = NO_LIMITS

    @property
    def account(self) -> str:
        """Keys with the same name share their limits, so that a key can be replaced by another one."""
        return self.name if self.name is not None else f"digest {self.digest.hex()}"


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file; raises a RequestError that names the wrong line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError(f"{path} cannot be read: {reason}", "api_key_file") from error
    keys: dict[bytes, Key] = {}
    named: dict[str, tuple[int, Limits]] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = _read_line(words)
            if key.digest in keys:
                raise ValueError("this key is in an earlier line too")
            if key.name is not None:
                first, limits = named.setdefault(key.name, (number, key.limits))
                if limits != key.limits:
                    raise ValueError(f"{key.name!r} has other limits in line {first}; keys of one name share them")
            if len(keys) == MAX_KEYS:
                raise ValueError(f"there are more than {MAX_KEYS:,} keys")
        except ValueError as error:
            raise RequestError(f"{path}, line {number}: {error}", "api_key_file") from None
        keys[key.digest] = key
    if not keys:
        raise RequestError(f"{path} holds no key; a server that it guards would be open", "api_key_file")
    return tuple(keys.values())


def _read_line(words: list[str]) -> Key:
    if not KEY.fullmatch(words[0]):
        raise ValueError("the key has characters that no HTTP header can carry; allowed: ASCII from ! to ~")
    values: dict[str, str] = {}
    for position, word in enumerate(words[1:], 2):
        name, equals, value = word.partition("=")
        if not equals or name not in OPTIONS:  # it may be part of a key, so it is not shown
            hint = nearest(name, OPTIONS, f"allowed: {', '.join(f'{one}=…' for one in OPTIONS)}")
            raise ValueError(f"word {position} is no option of a key{hint}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = value
    limits = Limits(**{each: _count(each, values[each]) for each in LIMITS if each in values})
    return Key(digest_of(words[0]), _name(values.get("name")), limits)


def _name(value: str | None) -> str | None:
    if value == UNNAMED:
        raise ValueError(f"name is {value!r}, which is what keys without a name are called")
    if value is not None and not NAME.fullmatch(value):
        allowed = "up to 64 of A-Z, a-z, 0-9 and _ . : @ -, a letter or digit first"
        raise ValueError(f"name is {value!r:.80}; allowed: {allowed}")
    return value


def _count(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:20]) <= MAX_LIMIT):
        raise ValueError(f"{name} is {value!r:.80}; allowed: a whole number from 1 to {MAX_LIMIT:,}")
    return int(value)


class KeyRing(Collector):
    """The keys in force, from the configuration and from its file, and the account of each.

    Everything but reading the file runs in the event loop's thread. An account keeps its usage and its metrics when the
    file is read again.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._path = None if config.api_key_file is None else Path(config.api_key_file)
        self._given = tuple(Key(digest_of(key)) for key in dict.fromkeys(config.api_keys))
        self._prefix, self._clock = config.metrics_prefix, clock
        self._keys: list[tuple[bytes, Account]] = []
        self._accounts: dict[str, Account] = {}
        self._counts: dict[str, KeyCounts] = {}
        self._is_valid = True  # the file, when it was last read
        self._wanted = asyncio.Event()
        seen = self._look()
        self._put(() if self._path is None else read_keys(self._path))
        self._taken = seen

    def __bool__(self) -> bool:
        return bool(self._keys)

    def match(self, offered: str) -> Account | None:
        """The account of a key, in time that depends neither on how much of a key is right nor on which key it is."""
        found, digest = 0, digest_of(offered)
        for number, (known, _) in enumerate(self._keys, 1):
            found += number * hmac.compare_digest(digest, known)
        return self._keys[found - 1][1] if found else None

    # Reading again --------------------------------------------------------------------------------------------------
    async def watch(self) -> None:
        """Read the file again when it has changed or `ask` was called, for as long as the server runs."""
        if self._path is None:
            return
        before = self._taken
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), WATCH_SECONDS)
            is_asked = self._wanted.is_set()
            self._wanted.clear()
            seen = await asyncio.to_thread(self._look)
            if is_asked or (seen != self._taken and seen == before):
                self._taken = seen
                await self._read_again()
            before = seen

    def ask(self) -> None:
        """Read the file as soon as possible."""
        self._wanted.set()

    def _look(self) -> tuple[int, ...] | None:
        """Values that change when the file changes; None: there is no file."""
        try:
            found = os.stat(self._path) if self._path is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)

    async def _read_again(self) -> None:
        assert self._path is not None
        try:
            keys = await asyncio.to_thread(read_keys, self._path)
        except RequestError as error:
            self._is_valid = False
            log.error("%s; the %d keys from before stay in force", error, len(self._keys))
            return
        self._put(keys)
        self._is_valid = True
        log.info("read %s again: %d keys", self._path, len(keys))

    def _put(self, keys: tuple[Key, ...]) -> None:
        """Replace the file's previous keys by these. Accounts that still exist keep their usage."""
        unique = {key.digest: key for key in (*self._given, *keys)}  # for a key in both, the file's limits apply
        accounts: dict[str, Account] = {}
        for key in unique.values():
            name = key.name or UNNAMED
            counts = self._counts.setdefault(name, KeyCounts())
            account = accounts.get(key.account) or self._accounts.get(key.account)
            if account is None:
                account = Account(name, key.limits, counts, self._clock)
            account.set_limits(key.limits)
            accounts[key.account] = account
        self._accounts = accounts
        self._keys = [(key.digest, accounts[key.account]) for key in unique.values()]

    # Metrics --------------------------------------------------------------------------------------------------------
    def collect(self) -> Iterator[Metric]:
        if not self._keys:
            return
        yield from AccountCollector(self._prefix, self._counts).collect()
        if self._path is not None:
            text = "1 while the keys in force are those of the key file, 0 when it could not be read again."
            family = GaugeMetricFamily(self._prefix + "api_key_file_valid", text)
            family.add_metric([], float(self._is_valid))
            yield family
