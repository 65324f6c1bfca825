"""Write, and why each token came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np

from tests.server.harness import Live
from tests.web.conftest import current, done, drawn, run, set_param, settle, wait
from unspool.sampling.draw import gumbel

STORY = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 3}
# Milliseconds between the frames of the browser, in window.frames_seen.
FRAMES = """() => { window.frames_seen = []; let last = performance.now();
  const next = (now) => { window.frames_seen.push(now - last); last = now; requestAnimationFrame(next); };
  requestAnimationFrame(next); }"""


def _spread(times: list[float]) -> str:
    least_to_most = sorted(times)
    at = [least_to_most[int(share * (len(times) - 1))] for share in (0.5, 0.99, 1)]
    return f"{len(times)}: median {at[0]:.1f} ms, 99% within {at[1]:.1f} ms, longest {at[2]:.1f} ms"


def busy_seconds(page: Any) -> Iterator[float]:
    """Processor time of the page's main thread since the last time; what else the machine does changes it little."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = 0.0
    while True:
        reported = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        yield reported["TaskDuration"] - before
        before = reported["TaskDuration"]


def depth(page: Any, index: int) -> float:
    value = page.evaluate(f"document.querySelectorAll('.answer .t')[{index}].style.getPropertyValue('--h')")
    return float(value) if value else 0.0


def test_an_answer_streams_in_and_is_tinted_by_probability(page: Any) -> None:
    run(page, "The sea is", **STORY)
    assert drawn(page) == 24
    state = current(page)
    text = "".join(token["text"] for token in state["tokens"])
    assert page.locator(".tokens").inner_text().replace("\n", "") == text.replace("\n", "")
    for index, token in enumerate(state["tokens"]):
        p = math.exp(token["logprob"])
        assert abs(depth(page, index) - (0 if p >= 0.7 else (1 - p / 0.7) ** 0.75)) < 1e-3
    page.select_option("#tint", "surprise")
    settle(page)
    bits = -state["tokens"][5]["logprob"] / math.log(2)
    assert abs(depth(page, 5) - min(1, bits / 12)) < 1e-3
    page.select_option("#tint", "entropy")
    settle(page)
    assert abs(depth(page, 5) - min(1, state["tokens"][5]["trace"]["entropy_bits"] / 8)) < 1e-3
    page.select_option("#tint", "time")
    settle(page)
    gaps = [b["at"] - a["at"] for a, b in zip(state["tokens"], state["tokens"][1:], strict=False)]
    latest = 1 + gaps.index(max(gaps))
    assert depth(page, latest) == max(depth(page, index) for index in range(24)), "the latest is tinted the most"
    page.select_option("#tint", "none")
    settle(page)
    assert page.locator(".t.tinted").count() == 0


def test_nothing_stands_between_prompt_and_answer_that_the_model_did_not_write(page: Any) -> None:
    run(page, "The sea is", **STORY)
    text = "".join(token["text"] for token in current(page)["tokens"])
    assert page.evaluate("document.querySelector('.text').textContent") == "The sea is" + text


def test_the_least_likely_tokens_are_one_click_away(page: Any) -> None:
    run(page, "The sea is", **{**STORY, "temperature": 1.3})
    tokens = current(page)["tokens"]
    unlikely = sorted(range(len(tokens)), key=lambda index: tokens[index]["logprob"])
    first = page.locator(".unlikely button >> nth=0")
    assert f"{100 * math.exp(tokens[unlikely[0]]['logprob']):.2g}"[:3] in first.inner_text()
    first.click()
    page.wait_for_selector(f".step[data-index='{unlikely[0]}']")


def test_parameters_show_their_values_and_who_set_them(page: Any) -> None:
    assert page.locator(".param:has(#p-top_k) .origin").inner_text() == "default"
    assert page.input_value("#p-top_k") == "0"
    set_param(page, "top_k", 7)
    page.locator(".param:has(#p-top_k) .origin:text-is('request')").wait_for()
    page.click("[aria-label='Clear top_k']")
    wait(page, "document.querySelector('#p-top_k').value === '0'")
    run(page, "One", max_tokens=2)
    assert page.locator(".param:has(#p-seed) .origin").inner_text() == "drawn"
    assert str(current(page)["seed"]) in (page.get_attribute("#p-seed", "placeholder") or "")


def test_what_is_typed_stays_while_an_answer_comes(page: Any) -> None:
    run(page, "Once upon a time", to_end=False, max_tokens=200, seed=1)
    page.wait_for_selector(".answer .t >> nth=2")
    page.focus("#p-top_k")
    page.keyboard.press("Control+a")
    before = current(page)["tokens"]
    page.keyboard.type("4")
    wait(page, f"unspool.app.current.tokens.length > {len(before) + 4}")
    page.keyboard.type("2")
    page.keyboard.press("Tab")
    assert page.evaluate("unspool.app.asked.params.top_k") == 42
    page.click("button.stop")
    done(page)


def test_a_wrong_value_is_told_in_the_servers_words(page: Any) -> None:
    run(page, "The sea", max_tokens=4, top_p=7)
    assert "top_p is 7" in page.locator(".answer .error").inner_text()


def test_an_answer_can_be_stopped(page: Any) -> None:
    run(page, "Once upon a time", to_end=False, max_tokens=2000, seed=1)
    page.wait_for_selector(".answer .t >> nth=3")
    page.click("button.stop")
    done(page)
    assert current(page)["state"] == "stopped"
    assert "stopped by you" in page.locator(".answer .summary").inner_text()
    run(page, "Again", max_tokens=3)
    assert drawn(page) == 3


def test_special_tokens_blanks_and_newlines_are_shown_on_demand(page: Any) -> None:
    page.check("input[name=mode][value=chat]", force=True)
    run(page, "Say yes.", max_tokens=80, temperature=0, seed=1)
    state = current(page)
    assert state["finish"] == "eos"
    assert state["tokens"][-1]["special"] == "<|im_end|>"
    assert "<|im_end|>" not in page.locator(".tokens").inner_text()
    page.check("#marks")
    drawn(page)
    text = page.locator(".tokens").inner_text()
    assert "⟨<|im_end|>⟩" in text
    assert "·" in text


def test_an_edited_answer_goes_on_from_there(page: Any) -> None:
    run(page, "The sea is", **STORY)
    first = current(page)
    page.click("button:has-text('Edit')")
    text = page.input_value(".edit")
    assert text == "".join(token["text"] for token in first["tokens"])
    kept = "".join(token["text"] for token in first["tokens"][:4])
    page.fill(".edit", kept + " and the moon")
    page.click("button:has-text('Go on from here')")
    done(page)
    state = current(page)
    assert [token["id"] for token in state["tokens"][:4]] == [token["id"] for token in first["tokens"][:4]]
    assert state["parent"] == first["id"]
    assert "".join(token["text"] for token in state["tokens"]).startswith(kept + " and the moon")
    given = [token["text"] for token in state["tokens"] if token.get("given")]
    assert "".join(given) == " and the moon"
    assert page.locator(".t.given").count() == len(given)
    assert len(state["tokens"]) > 4 + len(given)


# Why this token -----------------------------------------------------------------------------------------------------
def test_hover_shows_the_top_of_the_distribution(page: Any) -> None:
    run(page, "The capital of France is", max_tokens=6, temperature=0, seed=1)
    page.hover(".answer .t >> nth=1")
    tip = page.locator(".tip")
    assert tip.is_visible()
    top = current(page)["tokens"][1]["top"]
    assert tip.locator(".tip-row").count() == len(top)
    assert f"{100 * math.exp(top[0]['logprob']):.1f}%" in tip.inner_text()


def test_a_click_opens_the_step_with_every_stage(page: Any) -> None:
    run(page, "The sea is", **STORY)
    page.click(".answer .t >> nth=3")
    page.wait_for_selector(".candidates tbody tr")
    wait(page, "document.querySelectorAll('.candidates .removed').length > 0")
    listed = page.locator(".stages li:not(.head)")
    assert [item.inner_text().split("\n")[0] for item in listed.all()] == ["model", "temperature", "top_p"]
    assert "✗ top_p" in page.locator(".candidates .removed >> nth=0").inner_text()
    assert "49,152" in listed.nth(0).inner_text()
    assert "✓ chosen again" in page.locator(".draw").inner_text()
    facts = page.locator(".step .facts").inner_text()
    trace = current(page)["tokens"][3]["trace"]
    assert f"{trace['entropy_bits']:.2f} bits" in facts


def test_what_a_stage_removed_stays_in_sight_however_much_is_left(page: Any) -> None:
    run(page, "The sea is", max_tokens=6, temperature=1.5, top_k=60, top_p=1, min_p=0.3, seed=3)
    page.click(".answer .t >> nth=2")
    page.wait_for_selector(".candidates .removed >> text=min_p")
    page.wait_for_selector(".candidates .removed >> text=top_k")
    listed = page.locator(".stages li:not(.head)")
    names = [item.locator(".name").inner_text() for item in listed.all()]
    assert names == ["model", "temperature", "top_k", "min_p"]
    reasons = page.locator(".candidates .removed .by").all_inner_texts()
    assert set(reasons) == {"✗ top_k", "✗ min_p"}, "some of each stage"
    assert "60 left · 49,092 removed" in listed.nth(2).inner_text()
    greyed = "getComputedStyle(document.querySelector('.candidates .removed')).color"
    assert page.evaluate(greyed) != page.evaluate("getComputedStyle(document.body).color")


def test_rank_and_entropy_are_of_the_full_vocabulary(page: Any, server: Live) -> None:
    """Against the probabilities of the likeliest 256 tokens: what the others can add to the entropy is bounded."""
    run(page, "The capital of France is", max_tokens=4, temperature=0.7, seed=2)
    state = current(page)
    for index, token in enumerate(state["tokens"]):
        output = [one["id"] for one in state["tokens"][:index]]
        body = {"prompt": state["prompt"], "output": output, "temperature": 0.7, "seed": 2, "trace_top": 256}
        trace = httpx.post(f"{server.url}/v1/whatif", json=body, timeout=60).json()["trace"]
        p = np.array([probability for _, probability in trace["alternatives"]])
        rest, least = 1 - p.sum(), -(p * np.log2(p)).sum()
        page.click(f".answer .t >> nth={index}")
        page.wait_for_selector(f".step[data-index='{index}'] .draw")
        facts = page.locator(".step .facts dd").all_inner_texts()
        assert int(facts[1]) == token["rank"] == 1 + [id for id, _ in trace["alternatives"]].index(token["id"])
        most = least + rest * np.log2(49_152 / max(rest, 1e-12))
        assert least - 0.01 <= float(facts[2].split()[0]) <= most + 0.01


def test_the_choice_that_is_shown_follows_from_the_trace_alone(page: Any) -> None:
    """Made again here, from the numbers of the trace and the noise that seed, position and token give."""
    run(page, "Once upon a time", max_tokens=16, temperature=1.1, top_p=0.95, seed=11)
    for index, token in enumerate(current(page)["tokens"]):
        trace = token["trace"]
        ids = np.array([one["token"] for one in trace["candidates"]])
        logits = np.array([one["logit"] for one in trace["candidates"]], np.float32)
        noise = gumbel(trace["seed"], trace["position"], ids)
        assert noise.tolist() == [one["gumbel"] for one in trace["candidates"]]
        winner = int(ids[np.argmax(logits + noise)])
        assert winner == token["id"] == trace["token"]
        page.click(f".answer .t >> nth={index}")
        page.wait_for_selector(f".step[data-index='{index}'] .draw")
        assert page.get_attribute(".draw", "data-winner") == str(winner)


def test_sliders_choose_again_and_say_that_it_is_hypothetical(page: Any) -> None:
    run(page, "The sea is", **STORY)
    index = next(i for i, token in enumerate(current(page)["tokens"]) if token["rank"] > 1)
    page.click(f".answer .t >> nth={index}")
    page.wait_for_selector(".sliders")
    page.locator("[data-whatif=temperature]").fill("0")
    page.wait_for_selector(".draw[data-hypothetical=yes]")
    wait(page, "document.querySelector('.draw').textContent.includes('noise') === false")
    assert "Hypothetical" in page.locator(".hypothetical").inner_text()
    best = current(page)["tokens"][index]["top"][0]["id"]
    assert page.get_attribute(".draw", "data-winner") == str(best)
    page.click("text=Back to what it was")
    page.wait_for_selector(".draw[data-hypothetical=no]")
    page.locator("[data-whatif=temperature]").fill("0")
    page.click("text=Go on that way")
    done(page)
    state = current(page)
    assert state["tokens"][index]["id"] == best
    assert state["params"]["temperature"]["value"] == 0


def test_typed_text_becomes_a_branch(page: Any) -> None:
    run(page, "The sea is", **STORY)
    page.click(".answer .t >> nth=2")
    page.wait_for_selector("#typed")
    page.fill("#typed", " full of whales")
    page.click(".typing button")
    wait(page, "unspool.app.current.parent !== null")
    done(page)
    state = current(page)
    assert "".join(token["text"] for token in state["tokens"][2:]).startswith(" full of whales")
    assert len(state["tokens"]) > 20


def test_the_answer_is_walked_by_keys(page: Any) -> None:
    run(page, "The sea is", **STORY)
    page.focus(".tokens")
    for key, cursor in (("ArrowRight", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        wait(page, f"unspool.app.cursor === {cursor}")
    settle(page)
    active = page.get_attribute(".tokens", "aria-activedescendant")
    assert page.get_attribute(f"#{active}", "aria-selected") == "true"
    page.keyboard.press("End")
    wait(page, "unspool.app.cursor === 23")
    page.keyboard.press("Escape")
    page.wait_for_selector(".step.empty")


def test_keys_that_come_before_the_next_frame_count(page: Any) -> None:
    run(page, "The sea is", **STORY)
    page.focus(".tokens")
    page.evaluate(
        """() => { const node = document.querySelector('.tokens');
          for (let time = 0; time < 5; time++)
            node.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true })); }"""
    )
    wait(page, "unspool.app.cursor === 4")


def test_without_records_the_step_is_scored_when_it_is_asked_for(page: Any) -> None:
    page.uncheck("text=Record every step")
    run(page, "The sea is", **STORY)
    assert "trace" not in current(page)["tokens"][0]
    page.click(".answer .t >> nth=4")
    page.wait_for_selector(".draw")
    assert page.get_attribute(".draw", "data-winner") == str(current(page)["tokens"][4]["id"])


def test_two_thousand_tokens_and_ten_thousand_stay_whole(
    open_page: Callable[..., Any], small_server: Live, capsys: Any
) -> None:
    for count in (2_000, 10_000):
        page = open_page(small_server)
        page.uncheck("text=Record every step")
        set_param(page, "max_tokens", count)
        page.click(".more summary")
        page.check("#p-ignore_eos")
        page.evaluate(FRAMES)
        cpu = busy_seconds(page)
        next(cpu)
        run(page, "a", seed=1, to_end=False)
        wait(page, "unspool.app.current.state !== 'running'", seconds=600)
        wait(page, f"document.querySelectorAll('.answer .t').length === {count}")
        drawings, frames, busy = page.evaluate("unspool.frames()"), page.evaluate("window.frames_seen"), next(cpu)
        with capsys.disabled():
            print(f"\n{count} tokens: drawing {_spread(drawings)}; frames {_spread(frames)}")
            print(f"processor time of the page {busy:.2f} s, {1000 * busy / len(frames):.1f} ms a frame")
        page.click(f".answer .t >> nth={count - 1}")
        page.wait_for_selector(".draw")
