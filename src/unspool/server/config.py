"""The configuration of a server: frozen, with a named field for every limit."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass

from unspool.errors import RequestError

POSITIVE = (
    "max_connections", "max_header", "header_timeout", "idle_timeout", "max_body", "max_bodies", "read_timeout",
    "stall_timeout", "ping_interval", "memory_wait", "max_loading",
)  # fmt: skip
LOG_FORMATS = ("text", "json", "off")


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None  # a file with more keys and their limits: see keys.py
    names: tuple[str, ...] = ()  # further names of the model
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # Host headers accepted in addition to loopback's, without keys
    lenient: bool = False
    drain: float = 30.0  # seconds that running requests get after SIGTERM
    max_body: int = 8 * 1024 * 1024  # bytes of one request
    max_bodies: int = 256 * 1024 * 1024  # bytes of all requests that are being read or prepared
    max_connections: int = 1000  # open at once
    max_header: int = 64 * 1024  # bytes of a request's line and headers
    header_timeout: float = 20.0  # seconds for them to arrive
    idle_timeout: float = 75.0  # seconds that a connection is kept after an answer
    read_timeout: float = 30.0  # seconds for a body to arrive
    stall_timeout: float = 60.0  # seconds after which a connection is closed whose client reads nothing
    ping_interval: float = 15.0  # seconds without output before a stream sends a comment
    memory_wait: float = 60.0  # seconds that a model waits for memory in use by other models
    max_loading: int = 1024  # requests that wait for one model to be loaded
    log_format: str = "text"  # text | json | off
    metrics_prefix: str = "unspool:"
    otel_endpoint: str | None = None

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be above 0", name)
        if not 0 <= self.drain < math.inf:
            raise RequestError(f"drain is {self.drain}; it must be at least 0", "drain")
        if not 0 <= self.port <= 65535:
            raise RequestError(f"port is {self.port}; allowed: 0 to 65535", "port")
        if any(not key.strip() for key in self.api_keys):
            raise RequestError("an API key is empty", "api_key")
        self._check_texts()

    def _check_texts(self) -> None:
        if any(not name.strip() for name in self.names):
            raise RequestError("a name of the model is empty", "name")
        if self.log_format not in LOG_FORMATS:
            raise RequestError(f"log is {self.log_format!r}; allowed: {', '.join(LOG_FORMATS)}", "log")
        if not re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)?", self.metrics_prefix):
            message = f"metrics_prefix is {self.metrics_prefix!r}; allowed: letters, digits, _ and :, no digit first"
            raise RequestError(message, "metrics_prefix")
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^/\s]+", origin):
                message = f"cors_origin is {origin!r}; allowed: * or an origin, as in https://example.org"
                raise RequestError(message, "cors_origin")
        if self.otel_endpoint is not None and not re.fullmatch(r"https?://[^/\s]\S*", self.otel_endpoint):
            message = f"otel_endpoint is {self.otel_endpoint!r}; allowed: a URL as in http://localhost:4318"
            raise RequestError(message, "otel_endpoint")

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    host = host.strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
