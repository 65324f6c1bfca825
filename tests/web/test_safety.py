"""Hostile text, lost servers, keys, readers of screens, small screens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import Live, make_llm
from tests.web.conftest import Watched, current, done, drawn, run, set_param, settle, wait
from unspool.llm import LLM
from unspool.server.config import ServerConfig

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
VIEWS = ("write", "branches", "engine", "verify", "learn", "chat")
# The focus is on the page itself, or what has it (or the label of a hidden radio button, or a box of a picture)
# has an outline, or a border of its own.
FOCUS_SEEN = """(() => {
  const here = document.activeElement;
  if (!here || here === document.body) return true;
  const places = [here, here.nextElementSibling, here.querySelector("rect")].filter(Boolean);
  return places.some((one) => {
    const style = getComputedStyle(one);
    return (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1) || parseFloat(style.strokeWidth) >= 3;
  });
})()"""
HOSTILE = {
    "markup": "<img src=x onerror=alert(1)><script>alert(2)</script><style>*{display:none}</style>&lt;b&gt; ${1}",
    "controls": "a\u0000b\u0007c\u001b[31md\u200be\u202egnp.exe\u2066f\ufeff",
    "rtl": "שלום עולם، مرحبا بالعالم (abc) 123",
    "long": "x" * 1500,
    "combining": "Z" + "\u0301" * 60 + " 👩‍👩‍👧‍👦 𝄞",
}


def write(page: Any, text: str) -> None:
    """Have the model write a text: a constraint leaves it no other."""
    constraint = {"kind": "choice", "value": [text]}
    page.evaluate(
        "(value) => { unspool.app.asked.params = { constraint: value, max_tokens: 1600, temperature: 0 }; }", constraint
    )
    page.click("button.primary:has-text('Run')")
    wait(page, "unspool.app.current !== null")
    done(page)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_model_writes_is_text_and_nothing_else(page: Any, name: str) -> None:
    text = HOSTILE[name]
    page.on("dialog", lambda dialog: pytest.fail(f"a dialog: {dialog.message}"))
    write(page, text)
    state = current(page)
    assert state["error"] is None, state["error"]
    assert "".join(token["text"] for token in state["tokens"]) == text
    drawn(page)
    for view in VIEWS:
        page.evaluate(f"unspool.app.go('{view}')")
        settle(page)
        assert page.locator("main img, main script, main style, main iframe").count() == 0
        hidden = re.findall(
            r"[\u0000-\u0008\u000b-\u001f\u200b\u202a-\u202e\u2066-\u2069\ufeff]", page.inner_text("main")
        )
        assert not hidden, (view, hidden)
        assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth + 1"), view
    page.evaluate("unspool.app.go('write')")
    page.click(".answer .t >> nth=0")
    page.wait_for_selector(".candidates")
    page.hover(".answer .t >> nth=0")
    if name == "controls":
        assert "[U+202E]" in page.locator(".tokens").inner_text()
        assert "\u2400" in page.locator(".tokens").inner_text()
    if name == "markup":
        assert "<script>alert(2)</script>" in page.locator(".tokens").inner_text()


def test_text_that_may_become_a_stop_string_is_held_and_marked(page: Any) -> None:
    asked = {"max_tokens": 24, "temperature": 0.8, "seed": 3}
    run(page, "The sea is", **asked)
    text = "".join(token["text"] for token in current(page)["tokens"])
    stop = text[12:24] + " never comes"
    set_param(page, "stop", stop)
    page.evaluate(
        """() => { window.held = []; new MutationObserver(() => {
          const held = document.querySelector('.held');
          if (held?.textContent) window.held.push(held.textContent);
        }).observe(document.querySelector('.answer'), { childList: true, subtree: true, characterData: true }); }"""
    )
    run(page, "The sea is")
    assert "".join(token["text"] for token in current(page)["tokens"]) == text
    held = page.evaluate("window.held")
    # The page draws once a frame, so it may skip a state that lasted for less.
    assert held
    assert all(stop.startswith(each) for each in held), held
    assert all(stop.startswith(part) for part in held), held
    assert page.locator(".held").count() == 0


def start_server(model: Path, port: int = 0) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "unspool", "serve", "-m", str(model), "--port", str(port), "--log", "off"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    while (found := re.search(r"(http://[^/\s]+)/v1", said)) is None:
        line = process.stderr.readline()
        assert line, said
        said += line
    return process, found[1]


def test_a_server_that_dies_is_told_and_its_return_too(open_page: Callable[..., Any], smollm2_path: Path) -> None:
    process, address = start_server(smollm2_path)
    try:
        page = open_page(address)
        run(page, "Once upon a time", to_end=False, max_tokens=4000, seed=1)
        page.wait_for_selector(".answer .t >> nth=4")
        process.send_signal(signal.SIGKILL)
        process.wait()
        page.wait_for_selector(".answer .error")
        state = current(page)
        assert state["state"] == "failed"
        assert len(state["tokens"]) >= 4
        page.wait_for_selector(".link.down")
        process, again = start_server(smollm2_path, int(address.rsplit(":", 1)[1]))
        assert again == address
        page.wait_for_selector(".link.up")
        page.click("text=Go on from what came")
        wait(page, "unspool.app.current.parent !== null")
        page.wait_for_selector(f".answer .t >> nth={len(state['tokens']) + 2}")
        page.click("button.stop")
        done(page)
        assert [one["id"] for one in current(page)["tokens"]][: len(state["tokens"])] == [
            one["id"] for one in state["tokens"]
        ]
    finally:
        process.kill()
        process.wait()


def test_a_key_is_asked_for_and_kept_in_memory_alone(open_page: Callable[..., Any]) -> None:
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0, api_keys=("sesame",)), make_llm())
    try:
        page = open_page(live)
        page.wait_for_selector(".signin")
        page.fill("input[name=key]", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector(".signin .error")
        page.fill("input[name=key]", "sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#prompt")
        run(page, "a", max_tokens=4, seed=1)
        assert drawn(page) == 4
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
        assert "sesame" not in kept
        page.click(".menu summary")
        page.click(".menu >> text=Copy as curl")
        page.wait_for_selector(".notice >> text=clipboard")
        command = page.evaluate("navigator.clipboard.readText()")
        assert "sesame" not in command
        environment = {**os.environ, "UNSPOOL_API_KEY": "sesame"}
        said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=environment)
        answer = "".join(token["text"] for token in current(page)["tokens"])
        assert json.loads(said.stdout)["choices"][0]["text"] == answer
        page.click("#sign-out")
        page.wait_for_selector(".signin")
        assert page.evaluate("unspool.app.tree.list().length") == 0
    finally:
        live.stop()


def test_everything_is_done_with_keys_alone(page: Any) -> None:
    """Tab and the arrows from the address bar to a branch, and what has the focus is always seen."""

    def tab_to(selector: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            assert page.evaluate(FOCUS_SEEN), page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
            if page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
                return
        raise AssertionError(f"Tab does not lead to {selector}")

    tab_to("#prompt")
    page.keyboard.press("Control+a")
    page.keyboard.type("The sea is")
    tab_to("#p-max_tokens")
    page.keyboard.press("Control+a")
    page.keyboard.type("12")
    page.keyboard.press("Control+Enter")
    wait(page, "unspool.app.current !== null")
    done(page)
    tab_to(".tokens")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.wait_for_selector(".step[data-index='2'] .candidates button.branch")
    tab_to(".candidates button.branch")
    page.keyboard.press("Enter")
    wait(page, "unspool.app.current.parent !== null")
    done(page)
    page.keyboard.press("Alt+ArrowLeft")
    wait(page, "unspool.app.current.parent === null")
    page.keyboard.press("Alt+ArrowRight")
    wait(page, "unspool.app.current.parent !== null")
    page.locator("a[href='#engine']").focus()
    for view in VIEWS:
        page.evaluate(f"unspool.app.go('{view}')")
        settle(page)
        page.evaluate("document.activeElement.blur()")
        for _ in range(25):
            page.keyboard.press("Tab")
            seen = page.evaluate(FOCUS_SEEN)
            assert seen, (view, page.evaluate("document.activeElement.outerHTML.slice(0, 200)"))


def test_nothing_moves_for_those_who_ask_for_less_motion(open_page: Callable[..., Any], server: Live) -> None:
    for motion, moves in (("reduce", False), ("no-preference", True)):
        page = open_page(server, "/", reduced_motion=motion)
        run(page, "Once upon a time", to_end=False, max_tokens=400, seed=1)
        page.wait_for_selector(".answer .caret")
        assert (page.evaluate("document.getAnimations().length") > 0) is moves
        page.click("button.stop")
        done(page)


def test_another_request_shows_as_counts_alone(page: Any, server: Live) -> None:
    import httpx

    httpx.post(f"{server.url}/v1/completions", json={"prompt": "xylophone quartz", "max_tokens": 4}, timeout=60)
    page.evaluate("unspool.app.go('engine')")
    page.wait_for_selector(".plan .work")
    page.wait_for_selector(".key.block-free")
    assert "xylophone" not in page.inner_text("main")


def serious_faults(page: Any, where: str) -> list[Any]:
    found = []
    for fault in page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]:
        if fault["impact"] in ("serious", "critical"):
            places = [f"{node['html'][:160]} {node.get('failureSummary', '')[:200]}" for node in fault["nodes"][:3]]
            found.append((where, fault["id"], places))
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readers_of_screens_find_no_serious_fault(open_page: Callable[..., Any], server: Live, scheme: str) -> None:
    page = open_page(server, "/", color_scheme=scheme, reduced_motion="reduce")
    run(page, "The sea is", max_tokens=24, temperature=0.9, top_p=0.9, seed=3)
    page.click(".answer .t >> nth=4")
    page.wait_for_selector(".candidates .removed")
    page.evaluate(AXE.read_text("utf-8"))
    found: list[Any] = []
    for view in VIEWS:
        page.evaluate(f"unspool.app.go('{view}')")
        settle(page)
        if view == "learn":
            page.click("#next")
            page.wait_for_selector("#next:not([disabled])")
        if view == "verify":
            page.click("#verify")
            page.wait_for_selector("#verdict")
        if view == "engine":
            page.wait_for_selector(".key.block-free")
        if view == "branches":
            page.click("#beam")
            wait(page, "unspool.app.tree.list().every((one) => one.state !== 'running')")
            page.wait_for_selector(".beams table")
        if view == "chat":
            page.fill("#say", "Hi")
            page.keyboard.press("Enter")
            page.wait_for_selector(".turn.assistant .regenerate")
            page.click(".settings summary")
        found += serious_faults(page, view)
    assert not found, json.dumps(found, indent=1, ensure_ascii=False)


@pytest.mark.parametrize("width", [360, 768, 1024, 1280, 3840])
def test_nothing_overflows_on_any_screen(open_page: Callable[..., Any], server: Live, width: int) -> None:
    page = open_page(server, "/", viewport={"width": width, "height": 800})
    run(page, "The sea is", max_tokens=16, temperature=0.9, top_p=0.9, seed=3)
    page.click(".answer .t >> nth=4")
    page.wait_for_selector(".candidates")
    for view in VIEWS:
        page.evaluate(f"unspool.app.go('{view}')")
        settle(page)
        wide = page.evaluate(
            """() => document.scrollingElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll('main *')]
            .filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
            .filter((node) => !node.closest('.scroll, .picture, .offscreen'))
            .slice(0, 4).map((node) => node.outerHTML.slice(0, 120))"""
        )
        assert wide == [], (view, wide)


def test_the_theme_is_the_visitors(open_page: Callable[..., Any], server: Live) -> None:
    page = open_page(server, "/", color_scheme="dark")
    background = "getComputedStyle(document.documentElement).backgroundColor"
    dark = page.evaluate(background)
    page.click("[aria-label^='Theme']")
    settle(page)
    assert page.evaluate(background) != dark
    page.reload()
    page.wait_for_selector("#prompt")
    assert page.evaluate(background) != dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_documents_page_works_under_its_own_policy(browser: Any, server: Live, scheme: str) -> None:
    watched = Watched(browser, server.url, color_scheme=scheme)
    watched.page.goto(server.url + "/docs")
    watched.page.wait_for_selector("details")
    assert watched.page.locator("details").count() > 10
    watched.page.set_viewport_size({"width": 390, "height": 844})
    watched.page.locator("details summary").first.click()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390, "it fits a phone"
    watched.page.evaluate(AXE.read_text("utf-8"))
    faults = serious_faults(watched.page, "docs")
    assert not faults, json.dumps(faults, indent=1, ensure_ascii=False)
    watched.check()


def test_an_engine_fails_and_the_page_says_so(open_page: Callable[..., Any], smollm2_path: Path) -> None:
    llm = LLM(smollm2_path)
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0), llm)
    try:
        page = open_page(live)

        def broken(plan: Any) -> Any:
            raise ValueError("broken on purpose")

        llm.engine.runner.run = broken  # type: ignore[method-assign]
        run(page, "The sea", max_tokens=4)
        assert "broken on purpose" in page.locator(".answer .error").inner_text()
    finally:
        live.stop()
