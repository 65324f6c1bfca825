"""What if, Engine, Verify, Learn, Chat."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.harness import Live
from tests.web.conftest import current, done, drawn, run, settle, wait
from unspool.llm import LLM
from unspool.models.random import SHAPES, random_checkpoint, write_random_gguf
from unspool.server.config import ServerConfig
from unspool.server.host import ModelHost
from unspool.server.hosted import HostedModel, ModelSpec

STORY = {"max_tokens": 20, "temperature": 0.9, "top_p": 0.9, "seed": 3}


def go(page: Any, name: str) -> None:
    page.click(f".top nav >> text={name}")
    settle(page)


def all_done(page: Any) -> None:
    wait(page, "unspool.app.tree.list().every((one) => one.state !== 'running')")
    settle(page)


def text_of(branch: dict[str, Any]) -> str:
    return "".join(token["text"] for token in branch["tokens"])


# What if ------------------------------------------------------------------------------------------------------------
def test_another_candidate_is_one_click_and_keeps_the_first_answer(page: Any) -> None:
    run(page, "The sea is", **STORY)
    first = current(page)
    page.click(".answer .t >> nth=5")
    page.wait_for_selector(".candidates button.branch")
    row = page.locator(".candidates tbody tr:has(button.branch) >> nth=0")
    token = int(row.get_attribute("data-token"))
    row.locator("button.branch").click()
    wait(page, "unspool.app.current.parent !== null")
    done(page)
    state = current(page)
    assert [one["id"] for one in state["tokens"][:6]] == [*(one["id"] for one in first["tokens"][:5]), token]
    assert state["tokens"][5]["given"]
    page.wait_for_selector(".step >> text=was put there by hand")
    assert state["report"]["cached_tokens"] <= state["usage"]["prompt_tokens"]
    go(page, "What if")
    assert page.locator("svg .node").count() == 3
    page.keyboard.press("Alt+ArrowLeft")
    settle(page)
    assert current(page)["id"] == first["id"]
    assert text_of(current(page)) == text_of(first)
    page.keyboard.press("Alt+ArrowRight")
    settle(page)
    assert current(page)["id"] == state["id"]


def test_siblings_grow_at_the_cursor_and_are_walked(page: Any) -> None:
    run(page, "The sea is", **STORY)
    first = current(page)
    page.click(".answer .t >> nth=4")
    go(page, "What if")
    page.fill("#siblings", "3")
    page.click("#grow")
    all_done(page)
    branches = json.loads(page.evaluate("JSON.stringify(unspool.app.tree.list())"))
    siblings = [one for one in branches if one["parent"] == first["id"]]
    assert len(siblings) == 3
    assert len({one["seed"] for one in siblings}) == 3
    for one in siblings:
        assert [token["id"] for token in one["tokens"][:4]] == [token["id"] for token in first["tokens"][:4]]
    for sibling in siblings:
        page.evaluate(f"unspool.app.show(unspool.app.tree.get({sibling['id']}), 4)")
        for index, seed in (
            (4, sibling["seed"]),
            (2, first["seed"]),
        ):  # before the place where it leaves, the first one's
            page.evaluate(f"unspool.app.select({index})")
            page.wait_for_selector(f".step[data-index='{index}'] .draw:has-text('noise of seed {seed},')")
            assert page.get_attribute(".draw", "data-winner") == str(sibling["tokens"][index]["id"])
    page.evaluate(f"unspool.app.show(unspool.app.tree.get({siblings[0]['id']}), 4)")
    page.keyboard.press("Alt+ArrowDown")
    page.keyboard.press("Alt+ArrowDown")
    settle(page)
    assert current(page)["id"] == siblings[2]["id"]
    page.locator("svg .node >> nth=1").focus()
    page.keyboard.press("Enter")
    settle(page)
    assert page.locator("svg .node.current").count() == 1


def test_two_runs_side_by_side(page: Any) -> None:
    run(page, "The sea is", **STORY)
    first = current(page)
    go(page, "What if")
    page.fill("#changes", "temperature=0, seed=5")
    page.click("#run-changed")
    all_done(page)
    other = json.loads(page.evaluate("JSON.stringify(unspool.app.tree.list().at(-1))"))
    assert other["params"]["temperature"]["value"] == 0
    assert other["seed"] == 5
    pairs = zip(first["tokens"], other["tokens"], strict=False)
    differs = next(i for i, (a, b) in enumerate(pairs) if a["id"] != b["id"])
    assert page.get_attribute(".difference", "data-index") == str(differs)
    assert "temperature (0.9, 0)" in page.locator(".difference").inner_text()
    assert page.locator(".column .distribution").count() == 2
    total = sum(token["logprob"] for token in first["tokens"])
    assert f"logprob {total:.2f}" in page.locator(".column >> nth=0").inner_text()
    page.fill("#changes", "nonsense")
    page.click("#run-changed")
    assert "name=value" in page.locator(".notice").inner_text()


def test_a_beam_search_is_a_tree_with_scores(page: Any, server: Live) -> None:
    run(page, "The capital of France is", max_tokens=8, temperature=1, seed=1)
    go(page, "What if")
    page.fill("#width", "3")
    page.click("#beam")
    all_done(page)
    page.wait_for_selector(".beams table")
    cells = [row.locator("td").all_inner_texts() for row in page.locator(".beams tbody tr").all()]
    body = {"prompt": "The capital of France is", "max_tokens": 8, "beam": {"width": 3}, "n": 3, "logprobs": 0}
    answer = httpx.post(f"{server.url}/v1/fork", json=body, timeout=60).json()
    scores = [f"{one['details']['beam_score']:.4f}" for one in answer["unspool"]["choices"]]
    assert [row[1] for row in cells] == scores
    assert page.locator(".beams svg .node").count() >= 3


# Engine -------------------------------------------------------------------------------------------------------------
def test_the_engine_shows_steps_cache_and_ceilings(page: Any) -> None:
    run(page, "Ships of every kind: " * 30, **STORY)
    number = current(page)["number"]
    go(page, "Engine")
    page.wait_for_selector(f".plan >> text=#{number}")
    assert "@ 0" in page.locator(f".work.prefill.mine:has-text('#{number} ')").first.inner_text()
    facts = page.locator(".facts.row").inner_text()
    assert f"#{number}" in facts
    assert "ms" in facts
    page.wait_for_selector(".key.block-free")
    counts = page.locator("[aria-label=Cache] .keys").inner_text()
    assert "private" in counts
    assert "prefix hits" in counts
    for name in ("Running", "Waiting", "Bandwidth", "Compute", "Cache"):
        assert page.locator(f".kpi:has(.kpi-name:text-is('{name}')) .kpi-value").inner_text() != ""
    painted = """() => [...document.querySelectorAll("canvas")].map((canvas) => {
      const data = canvas.getContext("2d")?.getImageData(0, 0, canvas.width, canvas.height).data;
      return data ? data.some((value) => value !== 0) : true; })"""
    assert all(page.evaluate(painted))
    with page.expect_download() as download:
        page.click("#perfetto")
    events = json.loads(Path(download.value.path()).read_text("utf-8"))["traceEvents"]
    check_trace_events(events)
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == number + 1]
    assert [span["name"] for span in spans[:2]] == ["prefill", "decode"]
    assert sum(span["args"]["tokens"] for span in spans) == len(current(page)["prompt"]) + 19


def check_trace_events(events: list[dict[str, Any]]) -> None:
    """The trace event format, as far as it is used: what each kind of event must have, and spans of a track that do not
    overlap, since a viewer drops those."""
    ends: dict[int, float] = {}
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        assert event["ph"] in ("X", "C", "M")
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
            continue
        assert isinstance(event["name"], str)
        assert event["dur"] >= 0
        assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-3
        ends[event["tid"]] = event["ts"] + event["dur"]
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert named == set(ends)


def test_a_pause_by_another_requests_prompt_names_it(page: Any, server: Live) -> None:
    run(page, "Once upon a time", to_end=False, max_tokens=120, seed=1, temperature=0)
    page.wait_for_selector(".answer .t >> nth=8")
    long = " ".join(f"word{index}" for index in range(400))
    other = httpx.post(f"{server.url}/v1/fork", json={"prompt": long, "max_tokens": 1, "seed": 1}, timeout=120).json()
    done(page)
    go(page, "Engine")
    page.wait_for_selector(f".facts.row >> text=(#{other['number']})")
    row = page.locator(f".work.prefill:has-text('#{other['number']} ')")
    page.check("#mine-only")
    while not row.count():
        assert page.locator("#older").is_enabled(), "it is in no step of this answer"
        page.click("#older")
        settle(page)
    assert page.locator(f".work.mine:has-text('#{other['number']} ')").count() == 0


def test_the_states_of_recurrent_layers_have_a_map(open_page: Callable[..., Any]) -> None:
    shape = replace(SHAPES["tiny-qwen3.5"], context_length=2048)
    llm = LLM(replace(random_checkpoint(shape), eos_ids=()), device="cpu", threads=1, kv_tokens=4096)
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0), llm)
    try:
        page = open_page(live)
        run(page, "abcdefgh" * 8, to_end=False, max_tokens=1500, seed=1)
        go(page, "Engine")
        page.wait_for_selector("#states canvas")
        page.wait_for_selector("[aria-label='Requests in the cache'] th:text-is('states')")
        own = page.locator("[aria-label='Requests in the cache'] tr.mine td").last
        assert int(own.inner_text()) >= 1
        page.evaluate("unspool.app.stop(unspool.app.current)")
        done_text = "[aria-label=Cache] .keys >> nth=1"
        wait(page, "document.querySelectorAll('[aria-label=Cache] .keys')[1].textContent.includes('held 0')")
        output = page.locator(done_text).inner_text()
        assert int(output.split("snapshot ")[1].split()[0]) >= 2
        page.evaluate("unspool.app.go('write')")
        page.click(".answer .t >> nth=5")
        page.wait_for_selector(".draw")
        assert "✓ chosen again" in page.locator(".draw").inner_text()
    finally:
        live.stop()


def start_replicas(model: Path) -> tuple[subprocess.Popen[str], str]:
    options = ["--replicas", "numa", "--port", "0", "--log", "off", "--kv-tokens", "2048"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unspool", "serve", "-m", str(model), *options], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = ""
    while (found := re.search(r"(http://[^/\s]+)/v1", said)) is None:
        line = process.stderr.readline()
        assert line, said
        said += line
    return process, found[1]


def test_every_view_works_where_the_engines_are_replicas(open_page: Callable[..., Any], tmp_path: Path) -> None:
    model = tmp_path / "noise.gguf"
    write_random_gguf(model, replace(SHAPES["tiny"], context_length=512))
    process, address = start_replicas(model)
    try:
        page = open_page(address)
        run(page, "The sea is", **STORY)
        assert drawn(page) == len(current(page)["tokens"])
        assert current(page)["number"] is None
        page.click(".answer .t >> nth=2")
        page.wait_for_selector(".draw")
        assert "✓ chosen again" in page.locator(".draw").inner_text()
        go(page, "What if")
        page.click("#grow")
        all_done(page)
        assert all(
            one["state"] == "done" for one in json.loads(page.evaluate("JSON.stringify(unspool.app.tree.list())"))
        )
        go(page, "Verify")
        page.click("#verify")
        page.wait_for_selector("#verdict")
        assert page.locator("#verdict").inner_text().startswith("✓ Identical")
        go(page, "Engine")
        page.wait_for_selector(".plan .work")
        page.wait_for_selector(".key.block-free")
        assert "numbers of its own" in page.locator("[aria-label=Timeline]").inner_text()
        assert page.locator(".mine").count() == 0, "no request can be told to be ours"
    finally:
        process.terminate()
        process.wait(30)


def test_drafts_are_marked_where_they_were_accepted_and_rejected(
    open_page: Callable[..., Any], smollm2_path: Path
) -> None:
    live = Live(ServerConfig(port=0, log_format="off", drain=0.0), LLM(smollm2_path, speculate="lookup"))
    try:
        page = open_page(live)
        run(
            page,
            "one two three four one two three four one two three four one two",
            max_tokens=60,
            temperature=0.5,
            seed=1,
        )
        page.wait_for_selector(".summary >> text=drafts:")
        page.wait_for_timeout(500)
        number = current(page)["number"]
        steps = httpx.get(f"{live.url}/v1/engine/steps").json()["steps"]
        works = [work for step in steps for work in step["works"] if work["request"] == number]
        drafted = sum(work["samples"] - 1 for work in works)
        accepted = page.locator(".t.accepted").count()
        assert accepted == 60 - len(works), "each step chooses one token beside those that were drafted for it"
        assert accepted > 3
        output = page.locator(".summary").inner_text()
        assert f"{accepted} accepted" in output
        rejected = int(output.split("accepted, ")[1].split()[0])
        assert 0 < rejected <= drafted - accepted
        page.hover(".t.rejected >> nth=0")
        assert "rejected here" in page.locator(".tip").inner_text()
        page.hover(".t.accepted >> nth=0")
        assert "accepted" in page.locator(".tip").inner_text()
        go(page, "Engine")
        assert page.locator(".work:has-text('1+')").count() > 0
    finally:
        live.stop()


# Verify -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["plain", "branch", "sibling", "chat"])
def test_the_same_answer_in_a_crowd_has_the_same_bits(page: Any, kind: str) -> None:
    if kind == "chat":
        page.check("input[name=mode][value=chat]", force=True)
    run(page, "Name a colour.", **STORY)
    if kind == "branch":
        page.click(".answer .t >> nth=5")
        page.locator(".candidates button.branch >> nth=1").click()
        wait(page, "unspool.app.current.parent !== null")
        done(page)
    if kind == "sibling":
        page.click(".answer .t >> nth=5")
        go(page, "What if")
        page.click("#grow")
        all_done(page)
        page.keyboard.press("Alt+ArrowDown")
    count = len(current(page)["tokens"])
    chosen = count - {"branch": 6, "sibling": 5}.get(kind, 0)
    go(page, "Verify")
    page.click("#verify")
    page.wait_for_selector("#verdict")
    verdict = page.locator("#verdict").inner_text()
    assert verdict.startswith(f"✓ Identical: {count} of {count} token ids and {chosen} of {chosen} logprobs"), verdict
    assert "16 random requests" in verdict


def menu(page: Any, name: str) -> None:
    page.click(".menu summary")
    page.click(f".menu >> text={name}")


def test_what_is_copied_gives_the_same_answer(page: Any, server: Live, tmp_path: Path) -> None:
    run(page, 'It\'s "the" sea;', **STORY)
    text = text_of(current(page))
    menu(page, "Copy as Python")
    page.wait_for_selector(".notice")
    program = tmp_path / "again.py"
    program.write_text(page.evaluate("navigator.clipboard.readText()"), "utf-8")
    assert subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout == text + "\n"
    menu(page, "Copy as curl")
    settle(page)
    page.wait_for_timeout(200)
    command = page.evaluate("navigator.clipboard.readText()")
    said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    assert json.loads(said)["choices"][0]["text"] == text
    for name, starts in (("Download JSON", "{"), ("Download CSV of the trace", "index,id")):
        with page.expect_download() as download:
            menu(page, name)
        assert Path(download.value.path()).read_text("utf-8").startswith(starts)


def test_a_permalink_reproduces_the_answer_and_checks_the_receipt(
    page: Any, open_page: Callable[..., Any], server: Live
) -> None:
    run(page, "The sea is", **STORY)
    ids = [token["id"] for token in current(page)["tokens"]]
    menu(page, "Copy permalink")
    page.wait_for_selector(".notice")
    link = page.evaluate("navigator.clipboard.readText()")
    other = open_page(server, link.removeprefix(server.url))
    assert "✓ The receipt matches" in other.locator("#receipt-verdict").inner_text()
    other.click("#reproduce")
    other.wait_for_selector("#reproduced")
    assert "✓ Reproduced: all 20" in other.locator("#reproduced").inner_text()
    assert [token["id"] for token in current(other)["tokens"]] == ids
    go(other, "Write")
    assert other.input_value("#prompt") == "The sea is"


def changed_link(link: str, **changes: Any) -> str:
    head, _, data = link.partition("#r=")
    reported = json.loads(base64.urlsafe_b64decode(data + "=" * (-len(data) % 4)))
    text = json.dumps({**reported, **{name: change(reported[name]) for name, change in changes.items()}})
    return head + "#r=" + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def test_a_permalink_of_another_engine_says_what_differs(
    page: Any, open_page: Callable[..., Any], server: Live
) -> None:
    page.check("input[name=mode][value=chat]", force=True)
    run(page, "Name a colour.", **STORY)
    page.evaluate("unspool.app.tell('')")
    menu(page, "Copy permalink")
    page.wait_for_selector(".notice >> text=clipboard")
    link = page.evaluate("navigator.clipboard.readText()").removeprefix(server.url)
    assert "Name a colour" not in link.partition("#")[0], "the request is in the fragment alone"
    other = open_page(server, changed_link(link, receipt=lambda own: {**own, "kernels": "cpu-neon", "version": "0"}))
    verdict = other.locator("#receipt-verdict").inner_text()
    assert "The receipt differs" in verdict
    assert "kernels: cpu-neon then" in verdict
    assert "version: 0 then" in verdict
    assert "weights" not in verdict
    other.click("#reproduce")
    other.wait_for_selector("#reproduced")
    assert "✓ Reproduced" in other.locator("#reproduced").inner_text()
    third = open_page(server, changed_link(link, ids=lambda ids: [*ids[:-1], ids[-1] + 1]))
    third.click("#reproduce")
    third.wait_for_selector("#reproduced")
    assert "✗ The answer is another one" in third.locator("#reproduced").inner_text()


def test_a_broken_permalink_is_told(open_page: Callable[..., Any], server: Live) -> None:
    page = open_page(server, "/#r=bm90IGEgbGluaw")
    assert "broken" in page.locator(".notice").inner_text()


# Learn --------------------------------------------------------------------------------------------------------------
def test_the_tour_runs_on_the_visitors_prompt(page: Any, server: Live) -> None:
    go(page, "Learn")
    page.fill(".learn textarea", "My favourite colour is")
    page.click(".tour >> text=Tokenize")
    page.wait_for_selector(".chip")
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": "My favourite colour is"}).json()["tokens"]
    assert [int(text) for text in page.locator(".chip small").all_inner_texts()] == ids

    def following(selector: str) -> None:
        page.click("#next")
        page.wait_for_selector("#next:not([disabled])" if "Repetition" not in selector else selector)
        page.wait_for_selector(selector)

    following(".big")  # prefill
    following(".distribution .chosen")  # logits
    following(".stages")  # select
    following("#append")
    page.click("#append")
    wait(page, f"document.querySelectorAll('.chip').length === {len(ids) + 2}")
    following(".lesson >> text=Finish reason")
    following("#timings")
    wait(page, "document.querySelectorAll('#timings td:nth-child(3)').length === 2")
    cached = page.locator("#timings td:nth-child(3)").all_inner_texts()
    assert cached[0] == "0 tokens"
    assert int(cached[1].split()[0]) > 100
    page.click("#next")  # the same table, without the cache
    cells = "[...document.querySelectorAll('#timings td:nth-child(3)')].map((cell) => cell.innerText).join()"
    wait(page, f"{cells} === '0 tokens,0 tokens'")
    page.click("#next")
    page.wait_for_selector("#greedy")
    all_done(page)
    assert len(page.locator("#greedy").inner_text()) > 20
    assert "repeat what stood before" in page.locator(".lesson").inner_text()
    page.click("text=Look at the loop in Write")
    assert drawn(page) == 96


# Chat ---------------------------------------------------------------------------------------------------------------
def test_a_conversation_is_kept_in_the_browser(page: Any) -> None:
    go(page, "Chat")
    page.fill("#say", "Name three planets.")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .regenerate")
    answer = page.locator(".turn.assistant p").inner_text()
    assert answer
    page.click(".settings summary")
    page.fill("#chat-system", "Answer in one word.")
    page.locator("#chat-system").blur()
    page.click(".regenerate")
    page.wait_for_selector(".regenerate")
    all_done(page)
    asked = json.loads(page.evaluate("JSON.stringify(unspool.app.tree.list().at(-1).asked.messages)"))
    assert [one["role"] for one in asked] == ["system", "user"]
    with page.expect_download() as download:
        page.click("#export-markdown")
    assert "## user\n\nName three planets." in Path(download.value.path()).read_text("utf-8")
    with page.expect_download() as download:
        page.click("#export-csv")
    table = list(csv.reader(io.StringIO(Path(download.value.path()).read_text("utf-8"))))
    tokens = json.loads(page.evaluate("JSON.stringify(unspool.app.tree.list().at(-1).tokens)"))
    assert [int(row[1]) for row in table[1:]] == [token["id"] for token in tokens]
    with page.expect_download() as download:
        page.click("#export-json")
    assert json.loads(Path(download.value.path()).read_text("utf-8"))["system"] == "Answer in one word."
    shown = page.locator(".turn.assistant p").inner_text()
    page.reload()
    page.wait_for_selector(".turn.assistant")
    assert page.locator(".turn.assistant p").inner_text() == shown
    assert page.locator(".settings select").count() == 1
    page.fill("#say", "And one more?")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn.assistant .regenerate")
    all_done(page)
    asked = json.loads(page.evaluate("JSON.stringify(unspool.app.tree.list().at(-1).asked.messages)"))
    assert [one["role"] for one in asked] == ["system", "user", "assistant", "user"]
    page.click("text=Token by token")
    assert drawn(page) > 0
    go(page, "Chat")
    page.click("[aria-label^='Delete']")
    page.wait_for_selector(".turns .hint")
    page.click("#undo")
    wait(page, "document.querySelectorAll('.turn.user').length === 2")
    page.click("[aria-label^='Delete Name three']")
    page.wait_for_selector(".turns .hint")
    page.reload()
    page.wait_for_selector(".turns .hint")


# Several models -----------------------------------------------------------------------------------------------------
def test_the_page_shows_one_of_several_models(
    open_page: Callable[..., Any], tmp_path: Path, smollm2_path: Path
) -> None:
    config = ServerConfig(port=0, log_format="off", drain=0.0)
    other = tmp_path / "noise.gguf"
    write_random_gguf(other, replace(SHAPES["tiny"], context_length=512))
    options = {"kv_tokens": 2048}
    specs = [ModelSpec(("smollm2",), smollm2_path, options=options), ModelSpec(("noise",), other, options=options)]
    live = Live(config, host=ModelHost([HostedModel(spec, config) for spec in specs], config, 1 << 40))
    try:
        page = open_page(live)
        wait(page, "unspool.app.caps?.model === 'smollm2'")
        assert page.locator("#model option").all_inner_texts() == ["smollm2", "noise (unloaded)"]
        run(page, "The sea is", **STORY)
        page.select_option("#model", "noise")
        wait(page, "unspool.app.caps.model === 'noise' && unspool.app.loading === null")
        settle(page)
        assert page.evaluate("unspool.app.tree.list().length") == 0, "the other model's tokens are forgotten"
        assert page.locator("#model option").all_inner_texts() == ["smollm2", "noise"]
        run(page, "The sea is", **STORY)
        assert current(page)["receipt"]["model"] == page.evaluate("unspool.app.caps.receipt.model")
        menu(page, "Copy as curl")
        page.wait_for_selector(".notice >> text=clipboard")
        command = page.evaluate("navigator.clipboard.readText()")
        said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert json.loads(said)["choices"][0]["text"] == text_of(current(page)), "the command names the model"
        menu(page, "Copy permalink")
        page.wait_for_timeout(200)
        link = page.evaluate("navigator.clipboard.readText()").removeprefix(live.url)
        go(page, "Engine")
        page.select_option("#model", "smollm2")
        wait(page, "unspool.app.caps.model === 'smollm2' && unspool.app.loading === null")
        go(page, "Chat")
        page.click("#new-chat")
        page.click("details.settings summary")
        assert page.locator("#chat-model").input_value() == "smollm2"
        page.fill("#say", "Name a planet.")
        page.click("#send")
        all_done(page)
        assert page.locator(".turn.assistant p").inner_text().strip()
        other = open_page(live, link)
        wait(other, "unspool.app.caps?.model === 'noise' && unspool.app.loading === null")
        other.click("#reproduce")
        other.wait_for_selector("#reproduced")
        assert "✓ Reproduced" in other.locator("#reproduced").inner_text()
    finally:
        live.stop()
