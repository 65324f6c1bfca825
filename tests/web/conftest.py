"""The inspector in a headless Chromium, beside a server with the default model.

They run where a browser is named: `make test-web`, or pytest tests/web --chromium PATH.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Live, make_llm
from unspool.llm import LLM
from unspool.server.config import ServerConfig

HERE = Path(__file__).parent
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--chromium"):
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no browser is named (--chromium)"))


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[Live]:
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0), LLM(smollm2_path))
    yield live
    live.stop()


@pytest.fixture(scope="session")
def small_server() -> Iterator[Live]:
    """A tiny random model with room for long answers."""
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0), make_llm(context=16384, kv_tokens=32768))
    yield live
    live.stop()


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = request.config.getoption("--chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page, and what must not happen in it: breaches of its policy, errors, requests to anybody else."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.address, self.errors, self.foreign = address, [], []
        self.page.add_init_script(WATCH)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", self._on_request)

    def _on_console(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.foreign.append(request.url)

    def open(self, rest: str = "/") -> Any:
        self.page.goto(self.address + rest)
        self.page.wait_for_selector("main > *:not(h1):not(.loading), .signin")
        return self.page

    def check(self) -> None:
        violations = self.page.evaluate("window.violations ?? []")
        self.context.close()
        assert violations == [], violations
        assert self.errors == [], self.errors
        assert self.foreign == [], self.foreign


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(server, "/#chat", color_scheme="dark"): a page that is watched to its end."""
    opened: list[Watched] = []

    def make(live: Any, rest: str = "/", **options: Any) -> Any:
        address = live if isinstance(live, str) else live.url
        opened.append(Watched(browser, address, **options))
        return opened[-1].open(rest)

    yield make
    for watched in opened:
        watched.check()


@pytest.fixture
def page(open_page: Callable[..., Any], server: Live) -> Any:
    return open_page(server)


def wait(page: Any, expression: str, seconds: float = 60) -> None:
    """Until an expression is true. Playwright's own way evaluates a text in the page, which its policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"{expression} is still not true"
        page.wait_for_timeout(30)


def set_param(page: Any, name: str, value: object) -> None:
    field = page.locator(f"#p-{name}")
    field.fill(str(value))
    field.blur()


def run(page: Any, prompt: str, *, to_end: bool = True, **params: object) -> None:
    """Run a prompt in Write, with parameters as the form takes them."""
    page.fill("#prompt", prompt)
    for name, value in params.items():
        set_param(page, name, value)
    before = page.evaluate("unspool.app.tree.list().length")
    page.click("button.primary:has-text('Run')")
    wait(page, f"unspool.app.tree.list().length > {before}")
    if to_end:
        done(page)


def done(page: Any) -> None:
    wait(page, "unspool.app.current.state !== 'running'")
    page.wait_for_selector(".summary:not([data-state=running])")


def settle(page: Any) -> None:
    """Two frames: what was asked for is drawn."""
    page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def current(page: Any) -> dict[str, Any]:
    """The branch that is shown, as data."""
    reported: dict[str, Any] = json.loads(page.evaluate("JSON.stringify(unspool.app.current)"))
    return reported


def drawn(page: Any) -> int:
    """Tokens that are drawn, once all are."""
    wait(page, "document.querySelectorAll('.answer .t').length === unspool.app.current.tokens.length")
    return int(page.locator(".answer .t").count())
