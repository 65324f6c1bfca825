"""How long /health takes while somebody attacks the server: each attack in turn, against this checkout or another.

    python -m benchmarks attacks
    python -m benchmarks attacks --python ../before/.venv/bin/python --only duplicate-keys,spaces

Every attack is sent again and again for some seconds, while another thread asks for /health on new connections at a
fixed rate. A question that waits makes those behind it wait as well: they are counted with what they would have waited.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from unspool.errors import BackendError

SETTLE = 3.0  # seconds for what a server prepares in the background
INTERVAL = 0.02  # seconds between two questions for /health
PATIENCE = 120.0  # seconds that an attacker or a question waits; one without an answer counts as that long
MB = 1_000_000


@dataclass
class Server:
    port: int
    process: subprocess.Popen[bytes]
    log: Any
    statuses: dict[str, int] = field(default_factory=dict)  # what attackers got: HTTP statuses and kinds of errors

    def post(self, path: str, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            outcome = str(answer.status)
        except OSError as error:
            outcome = type(error).__name__
        finally:
            connection.close()
        self.statuses[outcome] = self.statuses.get(outcome, 0) + 1

    def memory(self) -> int:
        """Resident bytes."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


Attack = Callable[[Server, float], None]  # attacks until a time of time.monotonic


def posting(path: str, make: Callable[[], bytes], at_once: int = 1) -> Attack:
    """The same request again and again, from some clients at once."""

    def attack(server: Server, end: float) -> None:
        body = make()

        def client() -> None:
            while time.monotonic() < end:
                server.post(path, body)

        together(client, at_once)

    return attack


def together(client: Callable[[], None], count: int) -> None:
    threads = [threading.Thread(target=client) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def endless_head(server: Server, end: float) -> None:
    """A header that never ends, as fast as it is taken."""
    piece = b"a" * 65_536
    while time.monotonic() < end:
        try:
            with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nx: ")
                while time.monotonic() < end:
                    connection.sendall(piece)
        except OSError:
            continue


def idle_connections(server: Server, end: float) -> None:
    """More connections than the server may have descriptors, and nothing sent on them."""
    with ExitStack() as stack:
        for _ in range(300):
            try:
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5))
            except OSError:
                break
        time.sleep(max(0.0, end - time.monotonic()))


def duplicate_keys() -> bytes:
    return ("{" + ",".join(f'"{number}":1' for number in range(60_000)) + ',"59999":2}').encode()


def completion(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode()


def chat(messages: int) -> Callable[[], bytes]:
    return lambda: json.dumps({"messages": [{"role": "user", "content": ""}] * messages, "max_tokens": 1}).encode()


def nested() -> bytes:
    """As many values as 8 MB of JSON can have."""
    return b'{"prompt": [' + b",".join([b"[1]"] * 1_990_000) + b"]}"


def stops() -> bytes:
    return completion(stop=[f"{number:02d}" + "x" * 120_000 for number in range(64)])()


@dataclass(frozen=True)
class Case:
    name: str
    what: str
    attack: Attack
    descriptors: int | None = None


def nothing(server: Server, end: float) -> None:
    time.sleep(max(0.0, end - time.monotonic()))


CASES = (
    Case("nothing", "no attack", nothing),
    Case("duplicate-keys", "an object of 60,000 keys, one of them twice", posting("/v1/completions", duplicate_keys)),
    Case("values", "8 MB of JSON in two million values", posting("/v1/completions", nested)),
    Case("endless-head", "a header without end", endless_head),
    Case("idle-connections", "300 idle connections, 256 descriptors", idle_connections, 256),
    Case("spaces", "a prompt of 7.9 MB of spaces", posting("/v1/completions", completion(prompt=" " * 7_900_000))),
    Case("words", "a prompt of 7.9 MB of words", posting("/v1/completions", completion(prompt="word " * 1_580_000))),
    Case("tokenize", "three /tokenize of 8 MB at once",
         posting("/tokenize", lambda: json.dumps({"prompt": "to be or " * 880_000}).encode(), 3)),
    Case("unicode", "three /tokenize of 8 MB at once, not ASCII",
         posting("/tokenize", lambda: json.dumps({"prompt": "Ж é 語 " * 800_000}, ensure_ascii=False).encode(), 3)),
    Case("messages", "100,000 empty messages", posting("/v1/chat/completions", chat(100_000))),
    Case("content", "a message of 7.9 MB", posting("/v1/chat/completions", lambda: json.dumps(
        {"messages": [{"role": "user", "content": "to be or " * 870_000}]}).encode())),
    Case("stops", "64 stops of 120 KB", posting("/v1/completions", stops)),
    Case("bad-words", "1,024 bad words of 7 KB", posting("/v1/completions", completion(
        bad_words=[f"{number:04d}" + "x" * 7000 for number in range(1024)]))),
)  # fmt: skip


# Measuring ----------------------------------------------------------------------------------------------------------
@contextmanager
def running(python: str, model: str, descriptors: int | None) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "import runpy; runpy.run_module('unspool', run_name='__main__')"
    if descriptors is not None:
        code = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors})); {code}"
    command = [python, "-c", code, "serve", "-m", model, "--port", str(port), "--log", "off", "--drain", "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(port, process)
            yield Server(port, process, log)
        finally:
            process.kill()
            process.wait()


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(6000):
        if process.poll() is not None:
            raise BackendError(f"the server ended with status {process.returncode}")
        if ask(port, 1.0) is not None:
            return
        time.sleep(0.05)
    raise BackendError("the server did not start within five minutes")


def ask(port: int, patience: float) -> float | None:
    """Seconds that /health takes on a new connection; None if it gives no answer."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        return time.monotonic() - start if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def watch(server: Server, done: threading.Event) -> list[float]:
    """Seconds that each question took that was due, asked or not, until the attack is over."""
    waits: list[float] = []
    while not done.is_set():
        took = ask(server.port, PATIENCE)
        took = PATIENCE if took is None else took
        waits += waits_of(took)
        time.sleep(max(0.0, INTERVAL - took))
    return sorted(waits)


def waits_of(took: float) -> list[float]:
    """What a question took, and what those that were due meanwhile would have taken."""
    return [took - late * INTERVAL for late in range(math.ceil(took / INTERVAL))]


def measure(case: Case, python: str, model: str, seconds: float) -> dict[str, Any]:
    with running(python, model, case.descriptors) as server:
        time.sleep(SETTLE)
        before, done = server.memory(), threading.Event()
        waits: list[float] = []
        watcher = threading.Thread(target=lambda: waits.extend(watch(server, done)))
        watcher.start()
        case.attack(server, time.monotonic() + seconds)
        grown = server.memory() - before
        done.set()
        watcher.join()
        return {
            "attack": case.name,
            "what": case.what,
            "p50_ms": round(1000 * waits[len(waits) // 2], 1),
            "p99_ms": round(1000 * waits[int(0.99 * (len(waits) - 1))], 1),
            "max_ms": round(1000 * waits[-1], 1),
            "memory_mb": round(grown / MB),
            "log_kb": round(os.fstat(server.log.fileno()).st_size / 1000),
            "told": dict(sorted(server.statuses.items())),
        }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks attacks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the checkout to attack (this one)")
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--only", default=",".join(names), help=f"attacks, by name: {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=5.0, help="that an attack is begun anew (5)")
    options = parser.parse_args(argv)
    wanted = options.only.split(",")
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    print(f"{'attack':<18}{'/health p50':>12}{'p99':>12}{'max':>12}{'memory':>10}{'log':>10}   answers")
    results = []
    for case in CASES:
        if case.name in wanted:
            row = measure(case, options.python, options.model, options.seconds)
            results.append(row)
            times = "".join(f"{row[name]:>9,.1f} ms" for name in ("p50_ms", "p99_ms", "max_ms"))
            print(f"{case.name:<18}{times}{row['memory_mb']:>7,} MB{row['log_kb']:>7,} kB   {row['told']}", flush=True)
    print(json.dumps({"benchmark": "attacks", "python": options.python, "seconds": options.seconds, "rows": results}))
    return 0
