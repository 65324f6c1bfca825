"""From sockets to bodies and back: reading within bounds, keys, request ids, the access log."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from unspool import strict_json
from unspool.errors import RequestError
from unspool.server.config import ServerConfig, is_loopback
from unspool.server.faults import Fault, HTTPFault, fault_of
from unspool.server.keys import UNNAMED
from unspool.server.sse import Receive, Scope, Send, dumps

if TYPE_CHECKING:
    from starlette.requests import Request

    from unspool.server.host import Lease, ModelHost
    from unspool.server.quotas import Account, Admission

access = logging.getLogger("unspool.access")
OPEN_ROUTES = frozenset({"/health", "/v1/health", "/ready", "/"})
OPEN_FILES = "/assets/"  # of the page at /, which asks for a key and contains nothing secret
# Parsing this many blocks every other thread for 0.2 s; a prompt of token ids has as many values as the context.
MAX_VALUES = 1_000_000
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class BodyReader:
    """Reads JSON bodies, with limits on the size and time of each and on the size of all together."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._held = 0  # bytes of bodies that are being read or used

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """A request's body; its size counts against the total until the context ends."""
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPFault(
                415, f"content-type is {kind[:80]!r}; only application/json is taken", code="unsupported_type"
            )
        self._check_length(request)
        chunks: list[bytes] = []
        try:
            yield await self._receive(request, chunks)
        except ClientDisconnect:
            raise HTTPFault(400, "the client left before its body was whole", code="client_disconnected") from None
        finally:
            self._held -= sum(map(len, chunks))

    async def _receive(self, request: Request, chunks: list[bytes]) -> bytes:
        size = 0
        try:
            async with asyncio.timeout(self._config.read_timeout):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    self._held += len(chunk)
                    self._check_size(size)
        except TimeoutError:
            message = f"the body did not arrive within {self._config.read_timeout:g} s"
            raise HTTPFault(408, message, code="request_timeout", headers={"connection": "close"}) from None
        data = b"".join(chunks)
        num_values = data.count(b",")  # or fewer: a text may contain commas too
        if num_values > MAX_VALUES:
            message = f"the body has {num_values:,} commas; at most {MAX_VALUES:,} are taken"
            raise HTTPFault(413, message, code="request_too_large")
        return data

    def _check_length(self, request: Request) -> None:
        length = request.headers.get("content-length", "")
        if length.isdecimal():
            self._check_size(int(length))

    def _check_size(self, size: int) -> None:
        most = self._config.max_body
        if size > most:
            message = f"the body has {size:,} bytes or more; at most {most:,} are taken"
            raise HTTPFault(413, message, code="request_too_large", headers={"connection": "close"})
        if self._held > self._config.max_bodies:
            again = {"retry-after": "1", "connection": "close"}
            raise HTTPFault(429, "too many large requests at once", code="too_many_bodies", headers=again)


def parse_object(data: bytes) -> dict[str, Any]:
    """A body's JSON object; raises a RequestError if it is not one."""
    try:
        value = strict_json.loads(data)
    except RecursionError:
        raise RequestError("the body is nested too deeply", None, "invalid_json") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise RequestError(f"the body is not JSON: {error}", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", None, "invalid_json")
    return value


async def respond(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def fault_body(scope: Scope, fault: Fault) -> bytes:
    """The fault in the format of the API that the path belongs to."""
    if scope["path"].startswith("/v1/messages"):
        return dumps(fault.anthropic() | {"request_id": scope.get("unspool.id")})
    return dumps(fault.openai())


class Guard:
    """The outermost layer: request ids, keys, hosts, handling of all remaining errors, metrics and the access log."""

    def __init__(self, app: Any, host: ModelHost) -> None:
        self._app, self._host, self._config = app, host, host.config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        id = self._request_id(scope)
        scope["unspool.id"] = id.decode()
        scope["unspool.send"] = send  # for a stream's body, which skips the layers between
        scope["app"] = self  # so that the router raises for unknown paths instead of answering itself
        status = 0

        async def send_on(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                account: Account | None = scope.get("unspool.account")
                limits = () if account is None else account.headers(scope["path"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id), *limits]
            await send(message)

        try:
            self._admit(scope)
            await self._app(scope, receive, send_on)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a Rust library is no Exception
            fault = self._fault(scope, error)
            if status == 0:
                headers = [(name.encode(), value.encode()) for name, value in fault.headers]
                await respond(send_on, fault.status, fault_body(scope, fault), headers)
        finally:
            lease: Lease | None = scope.get("unspool.lease")
            if lease is not None:
                lease.release()
            admission: Admission | None = scope.get("unspool.admission")
            if admission is not None:
                admission.end()
            self._log(scope, status, time.perf_counter() - started)

    def _fault(self, scope: Scope, error: BaseException) -> Fault:
        if isinstance(error, HTTPException):
            path = scope["path"][:200]
            messages = {404: f"there is nothing at {path}", 405: f"{scope['method']} is not for {path}"}
            message = messages.get(error.status_code, error.detail)
            error = HTTPFault(error.status_code, message, headers=dict(error.headers or {}))
        lease: Lease | None = scope.get("unspool.lease")
        return fault_of(error, retry_after=self._host.retry_after(lease.model if lease is not None else None))

    def _request_id(self, scope: Scope) -> bytes:
        given = header(scope, b"x-request-id")
        if given is not None and REQUEST_ID.fullmatch(given):
            return given
        return f"req_{secrets.token_hex(12)}".encode()

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        if path in OPEN_ROUTES or path.startswith(OPEN_FILES):
            return
        keys = self._host.keys
        if keys:
            found = [account for key in _offered(scope) if (account := keys.match(key)) is not None]
            if not found:
                challenge = {"www-authenticate": 'Basic realm="unspool"' if path == "/docs" else "Bearer"}
                raise HTTPFault(401, "a valid API key is needed", code="invalid_api_key", headers=challenge)
            scope["unspool.account"] = found[0]
        else:
            self._check_host(scope)

    def _check_host(self, scope: Scope) -> None:
        """Without a key, refuse foreign host names: prevents DNS rebinding by a page in a browser."""
        if not self._config.is_loopback:
            return
        host = (header(scope, b"host") or b"").decode("latin-1").lower()
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if name and not is_loopback(name) and name not in self._config.allowed_hosts:
            raise HTTPFault(403, f"the host {name[:80]!r} is not served; --allow-host adds it", code="unknown_host")

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("unspool.route", "other")
        self._host.metrics.on_response(route, status)
        if self._config.log_format == "off":
            return
        client = scope.get("client") or ("-", 0)
        about = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "id": scope["unspool.id"],
            "client": client[0],
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **self._who_and_what(scope),
        }
        if self._config.log_format == "json":
            access.info(json.dumps(about, ensure_ascii=True))
        else:
            facts = " ".join(f"{name}={value}" for name, value in self._who_and_what(scope).items())
            line = (
                f"{about['client']} {about['method']} {about['path']!r} {status} {seconds:.3f}s {about['id']} {facts}"
            )
            access.info(line.rstrip())


    def _who_and_what(self, scope: Scope) -> dict[str, Any]:
        """For the access log: the name of a request's key, its model if there are several, and its result."""
        facts: dict[str, Any] = {}
        account: Account | None = scope.get("unspool.account")
        if account is not None and account.name != UNNAMED:
            facts["key"] = account.name
        lease: Lease | None = scope.get("unspool.lease")
        if lease is not None and len(self._host.models) > 1:
            facts["model"] = lease.model.name
        return facts | scope.get("unspool.facts", {})


def _offered(scope: Scope) -> list[str]:
    """The keys in a request: Bearer, Anthropic's x-api-key, or a browser's password. Browsers also add passwords to
    requests from other sites' pages, so a password counts only for GET, or if the browser reports the same origin (a
    page cannot forge that)."""
    is_ours = scope["method"] == "GET" or header(scope, b"sec-fetch-site") == b"same-origin"
    keys = []
    for name, value in scope["headers"]:
        text = value.decode("latin-1")
        if name == b"x-api-key":
            keys.append(text.strip())
        elif name == b"authorization":
            scheme, _, rest = text.partition(" ")
            if scheme.lower() == "bearer":
                keys.append(rest.strip())
            elif scheme.lower() == "basic" and is_ours:
                keys.append(_password(rest))
    return keys


def _password(basic: str) -> str:
    try:
        return base64.b64decode(basic.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
