"""`unspool run` and `unspool explain` on a tiny model: what goes to stdout, what to stderr, how it ends."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unspool.cli import main
from unspool.cli.run import EPILOG
from unspool.cli.table import Cell, Column

Capture = pytest.CaptureFixture[str]
REFERENCE = ["--device", "reference", "--kv-tokens", "4096"]
# Answers over three bytes, so that text is text: newline, a, b.
LETTERS = ["--allowed-token-ids", "10,97,98", "--seed", "5"]


def command(model: str, *arguments: str) -> list[str]:
    return ["run", "-m", model, *REFERENCE, *arguments]


def start(model: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """A process of its own, for what concerns pipes and signals."""
    call = [sys.executable, "-m", "unspool", *command(model, *arguments)]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def answer(model: str, capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(command(model, *arguments, "--json")) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    object: dict[str, Any] = json.loads(captured.out)
    return object


# What is printed ---------------------------------------------------------------------------------------------------
def test_the_answer_is_on_stdout_and_the_summary_on_stderr(chat_model: str, capsys: Capture) -> None:
    assert main(command(chat_model, "hello", "-n", "12", *LETTERS)) == 0
    captured = capsys.readouterr()
    assert set(captured.out) <= set("\nab")
    assert captured.out.endswith("\n")
    assert captured.err.startswith("12 tokens · first after ")
    assert "tokens/s · cut at its length · seed 5\n" in captured.err
    assert captured.err.count("\n") == 1
    assert main(command(chat_model, "hello", "-n", "12", *LETTERS, "--quiet")) == 0
    assert capsys.readouterr() == (captured.out, "")


def test_json_has_everything(chat_model: str, capsys: Capture) -> None:
    shown = answer(chat_model, capsys, "hello", "-n", "9", "--temperature", "0.5", *LETTERS)
    assert shown["model"] == "tiny-chat"
    assert bytes(shown["token_ids"]).decode() == shown["text"]
    assert shown["finish_reason"] == "length"
    assert shown["params"]["temperature"] == {"value": 0.5, "origin": "request"}
    assert shown["params"]["top_p"]["origin"] == "default"
    assert shown["params"]["seed"] == {"value": 5, "origin": "request"}
    assert shown["usage"] == {"prompt_tokens": 23, "completion_tokens": 9, "cached_tokens": 0, "total_tokens": 32}
    assert set(shown["timings"]) == {"load", "queue", "prefill", "decode", "total", "first_token", "tokens_per_second"}
    assert shown["receipt"]["kernels"] == "reference"
    assert shown["receipt"]["seed"] == 5
    assert shown["warnings"] == []
    assert "choices" not in shown
    assert "logprobs" not in shown


def test_the_same_seed_gives_the_same_answer(chat_model: str, capsys: Capture) -> None:
    drawn = answer(chat_model, capsys, "hello", "-n", "16")
    assert drawn["params"]["seed"]["origin"] == "drawn"
    again = answer(chat_model, capsys, "hello", "-n", "16", "--seed", str(drawn["params"]["seed"]["value"]))
    assert again["token_ids"] == drawn["token_ids"]


def test_several_answers(chat_model: str, capsys: Capture) -> None:
    shown = answer(chat_model, capsys, "hello", "-n", "8", "--answers", "3", *LETTERS)
    texts = [choice["text"] for choice in shown["choices"]]
    assert len(texts) == 3
    assert shown["text"] == texts[0]
    assert shown["usage"]["completion_tokens"] == 24
    assert main(command(chat_model, "hello", "-n", "8", "--answers", "3", *LETTERS)) == 0
    printed = capsys.readouterr().out
    ended = [text if text.endswith("\n") else text + "\n" for text in texts]
    assert printed == "".join(f"[{number}]\n{text}" for number, text in enumerate(ended, 1))


def test_logprobs_are_told_with_their_texts(chat_model: str, capsys: Capture) -> None:
    shown = answer(chat_model, capsys, "hi", "-n", "3", "--logprobs", "2", "--prompt-logprobs", "0", "--raw", *LETTERS)
    assert [token["id"] for token in shown["logprobs"]] == shown["token_ids"]
    assert all(len(token["top"]) == 2 and token["logprob"] < 0 for token in shown["logprobs"])
    assert shown["prompt_logprobs"][0] is None
    assert shown["prompt_logprobs"][1]["text"] == "i"
    assert main(command(chat_model, "hi", "--logprobs", "2")) == 2
    assert "--logprobs is shown with --json alone" in capsys.readouterr().err


def test_warnings_go_to_stderr(chat_model: str, capsys: Capture) -> None:
    assert main(command(chat_model, "hi", "-n", "2", "--temperature", "0", "--top-p", "0.5", "-q")) == 0
    assert capsys.readouterr().err == "unspool: warning: temperature 0 takes the best token: top_p can do nothing\n"


def test_stop_understands_escapes(chat_model: str, capsys: Capture) -> None:
    whole = answer(chat_model, capsys, "hello", "-n", "64", *LETTERS)
    assert "\n" in whole["text"]
    cut = answer(chat_model, capsys, "hello", "-n", "64", "--stop", r"\n", *LETTERS)
    assert cut["text"] == whole["text"].partition("\n")[0]
    assert (cut["finish_reason"], cut["stop"]) == ("stop", "\n")
    kept = answer(chat_model, capsys, "hello", "-n", "64", "--stop", r"\n", "--include-stop-str", *LETTERS)
    assert kept["text"] == cut["text"] + "\n"


def test_a_finished_constraint_is_an_ending_of_its_own(chat_model: str, capsys: Capture) -> None:
    shown = answer(chat_model, capsys, "hello", "--regex", "ab{3}", "--seed", "1")
    assert (shown["text"], shown["finish_reason"], shown["stop"]) == ("abbb", "constraint", None)
    exactly = answer(chat_model, capsys, "hello", "--regex", "ab{3}", "--seed", "1", "-n", "4")
    assert exactly["finish_reason"] == "constraint", "whole, and not cut"
    assert answer(chat_model, capsys, "hello", "--regex", "ab{3}", "-n", "3")["finish_reason"] == "length"
    assert main(command(chat_model, "hello", "--regex", "ab{3}")) == 0
    assert " · complete by its constraint · " in capsys.readouterr().err


def test_the_summary_names_the_stop(chat_model: str, capsys: Capture) -> None:
    assert main(command(chat_model, "hello", "-n", "64", "--stop", r"\n", *LETTERS)) == 0
    assert r" · stopped at '\n' · " in capsys.readouterr().err
    assert main(command(chat_model, "hello", "-n", "64", "--stop-token-ids", "10", *LETTERS)) == 0
    assert " · stopped at token 10 · " in capsys.readouterr().err


def test_a_beam_search_counts_cached_tokens_once(chat_model: str, capsys: Capture) -> None:
    """A beam that another one was forked into has computed its prompt, not found it."""
    reported = answer(chat_model, capsys, "hello", "-n", "8", "--beam", "4", "--answers", "4")
    assert reported["usage"]["cached_tokens"] == 0


# Where the prompt comes from ---------------------------------------------------------------------------------------
def type_in(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))


@pytest.mark.parametrize("arguments", [["-"], []])
def test_a_prompt_from_a_pipe(
    arguments: list[str], chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    direct = answer(chat_model, capsys, "hello\nthere", "-n", "4", *LETTERS)
    type_in(b"hello\nthere\n", monkeypatch)
    assert answer(chat_model, capsys, *arguments, "-n", "4", *LETTERS)["token_ids"] == direct["token_ids"]


def test_raw_leaves_the_template_out(chat_model: str, base_model: str, capsys: Capture) -> None:
    assert answer(chat_model, capsys, "hello", "--raw", "-n", "1")["usage"]["prompt_tokens"] == 5
    assert answer(chat_model, capsys, "hello", "-n", "1")["usage"]["prompt_tokens"] == len("user: hello\nassistant: ")
    assert answer(base_model, capsys, "hello", "-n", "1")["usage"]["prompt_tokens"] == 5


def test_a_system_message(chat_model: str, base_model: str, capsys: Capture) -> None:
    reported = answer(chat_model, capsys, "hello", "--system", "be brief", "-n", "1")
    assert reported["usage"]["prompt_tokens"] == len("system: be brief\nuser: hello\nassistant: ")
    assert main(command(chat_model, "hello", "--system", "x", "--raw")) == 2
    assert "--raw leaves out" in capsys.readouterr().err
    assert main(command(base_model, "hello", "--system", "x")) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "message"),
    [(b"", "the prompt is empty; give one, as in"), (b"ab\xff", "stdin is not UTF-8: byte 0xff at 2")],
)
def test_bad_input(
    typed: bytes, message: str, chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    type_in(typed, monkeypatch)
    assert main(command(chat_model)) == 2
    assert message in capsys.readouterr().err


# Mistakes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--frobnicate"], "unspool: --frobnicate is not an option (see unspool run --help)\n"),
        (["hi", "there"], "'there' is one argument too many; the prompt is one, in quotes"),
        (["hi", "--tempature", "1"], "--tempature is not an option; did you mean --temperature? (see"),
        (["hi", "--top=3"], "--top is not an option; did you mean --top-k, --top-p or --top-n-sigma?"),
        (["hi", "-top-p", "0.5"], "-top-p has one dash; write --top-p"),
        (["hi", "--n", "3"], "--n is not an option; --answers N is how many answers; -n N (--max-tokens) is how long"),
        (["hi", "--temp", "3"], "--temp is not an option; it is --temperature here"),
        (["hi", "--max-tokens"], "-n/--max-tokens needs a value"),
        (["hi", "--isa", "avx521"], "did you mean 'avx512'?"),
        (["hi", "--order", "vlm"], "order is 'vlm'; did you mean 'vllm'?"),
        (["hi", "--top-p", "1.5"], "unspool: top_p is 1.5; allowed: above 0"),
        (["hi", "--stop", ""], "stop[0] is an empty string"),
        (["hi", "--logit-bias", "5000=1"], "logit_bias names token 5000; the vocabulary has 320"),
        (["hi", "--threads", "0"], "threads is 0"),
        (["hi", "-m", "./other.gguf"], "unspool: -m/--model: given twice; it takes one value"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], message: str, chat_model: str, capsys: Capture
) -> None:
    assert main(command(chat_model, *arguments)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("unspool: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_missing_model(capsys: Capture) -> None:
    assert main(command("./missing.gguf", "hi")) == 2
    assert capsys.readouterr().err.startswith("unspool: ./missing.gguf does not exist")


def test_an_unreadable_model(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF but not really")
    assert main(command(str(path), "hi")) == 2
    assert f"unspool: {path}" in capsys.readouterr().err


def test_a_prompt_that_does_not_fit(short_model: str, capsys: Capture) -> None:
    assert main(command(short_model, "x" * 200)) == 2
    output = capsys.readouterr().err
    assert "the prompt is too long: it has 218 tokens. This model's maximum context length is 96 tokens" in output


@pytest.mark.parametrize(("flag", "field"), [("-n", "max_tokens"), ("--min-tokens", "min_tokens")])
def test_an_answer_that_cannot_become_so_long(flag: str, field: str, short_model: str, capsys: Capture) -> None:
    assert main(command(short_model, "hi", "--raw", flag, "95")) == 2
    message = f"maximum context length is 96 tokens. The prompt has 2 and {field} is 95: 97 together"
    assert message in capsys.readouterr().err


def test_the_end_of_the_context_is_told(short_model: str, capsys: Capture) -> None:
    reported = answer(short_model, capsys, "hi", "--ignore-eos")
    assert reported["finish_reason"] == "length"
    assert reported["usage"]["total_tokens"] == 96


# Pipes and signals -------------------------------------------------------------------------------------------------
def test_ctrl_c_stops_the_answer(chat_model: str) -> None:
    process = start(chat_model, "hello", "--ignore-eos", *LETTERS)
    assert process.stdout is not None
    first = process.stdout.read(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert set(first + out) <= set(b"\nab")
    assert b"interrupted" in err
    assert b"Traceback" not in err


def test_ctrl_c_with_json_prints_what_there_is(
    chat_model: str, interrupt_at: Callable[..., None], capsys: Capture
) -> None:
    interrupt_at(4)
    assert main(command(chat_model, "hello", "--json", *LETTERS)) == 130
    reported = json.loads(capsys.readouterr().out)
    assert reported["finish_reason"] == "abort"
    assert len(reported["token_ids"]) == reported["usage"]["completion_tokens"] == 4


def test_ctrl_c_gives_out_what_was_held_back(
    chat_model: str, interrupt_at: Callable[..., None], capsys: Capture
) -> None:
    """A stop string that never completes holds text back; an interrupted answer has it all the same."""
    interrupt_at(4)
    biased = ["--logit-bias", "97=100", "--stop", "a" * 30]
    assert main(command(chat_model, "hello", *biased, "-q")) == 130
    assert capsys.readouterr().out == "aaaa\n"


def test_a_third_ctrl_c_ends_at_once(chat_model: str, interrupt_at: Callable[..., None], capsys: Capture) -> None:
    interrupt_at(2, times=3)
    assert main(command(chat_model, "hello", *LETTERS)) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_failure(chat_model: str) -> None:
    process = start(chat_model, "hello", "--ignore-eos", *LETTERS)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=600) == 141
    assert err == b""


# Explaining --------------------------------------------------------------------------------------------------------
def explain(model: str, *arguments: str) -> int:
    return main(["explain", "-m", model, *REFERENCE, *arguments])


def test_explain_prints_a_row_a_token(chat_model: str, capsys: Capture) -> None:
    assert explain(chat_model, "hi", "-n", "5", "--temperature", "0.8", "--top-k", "4", "--seed", "3") == 0
    captured = capsys.readouterr()
    head, *rows = captured.out.splitlines()
    assert head.split()[:4] == ["token", "p", "rank", "entropy"]
    assert "temperature 0.8" in head
    assert "top_k 4" in head
    assert "draw: logit + noise" in head
    assert len(rows) == 5
    assert all(f"{number}  " in row for number, row in enumerate(rows, 1))
    assert "5 tokens" in captured.err


def test_explain_says_what_was_left_out(chat_model: str, capsys: Capture) -> None:
    assert explain(chat_model, "hi", "-n", "1", "--temperature", "1", "--top-k", "1", "--alternatives", "2") == 0
    captured = capsys.readouterr()
    assert captured.out.count("✗top_k") == 2
    assert "top_k 1 (from the request) leaves one token" in captured.err


@pytest.mark.parametrize("columns", [200, 80, 40])
def test_explain_fits_the_terminal(
    columns: int, chat_model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A table where there is room for all of it, else a paragraph a token; the same is said in both."""
    arguments = ["hi", "-n", "3", "--temperature", "0.8", "--top-k", "4", "--seed", "3", "--alternatives", "2", "-q"]
    assert explain(chat_model, *arguments) == 0
    table = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert explain(chat_model, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < columns
    if columns == 200:
        assert lines == table.splitlines()
        return
    reported = " ".join(" ".join(lines).split())
    _head, *rows = table.splitlines()
    assert "instead" not in lines[0].split(), "no header over nothing"
    for number, row in enumerate(rows, 1):
        cells = re.split("  +", row)
        assert f"{number} {cells[1]} {cells[2]} rank {cells[3]} entropy {cells[4]} bits" in reported
        assert f"temperature 0.8: {cells[5]} top_k 4 leaves {cells[6]} draw {cells[7]} ahead of {cells[8]}" in reported
        assert f"instead {cells[9]} {cells[10]}" in reported


def test_explain_aligns_wide_characters() -> None:
    column = Column("token", [Cell("'日本'"), Cell("'abcdef'")], right=False)
    assert [column.pad(cell.text) for cell in column.cells] == ["'日本'  ", "'abcdef'"]


@pytest.mark.parametrize("number", ["-1", "9"])
def test_explain_refuses_alternatives_that_it_does_not_have(number: str, chat_model: str, capsys: Capture) -> None:
    assert explain(chat_model, "hi", "--alternatives", number) == 2
    assert f"--alternatives is {number}; allowed: 0 to 8" in capsys.readouterr().err


def test_explain_greedy_has_no_noise(chat_model: str, capsys: Capture) -> None:
    assert explain(chat_model, "hi", "-n", "2", "--temperature", "0") == 0
    assert "best logit" in capsys.readouterr().out


def test_explain_in_json_can_be_recomputed(chat_model: str, capsys: Capture) -> None:
    import numpy as np

    from unspool.sampling.draw import gumbel

    assert explain(chat_model, "hi", "-n", "4", "--temperature", "0.7", "--top-p", "0.9", "--seed", "3", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert len(reported["steps"]) == 4
    for step, token in zip(reported["steps"], reported["token_ids"], strict=True):
        assert 0 < step["entropy_bits"] < np.log2(320)
        best, second = step["candidates"][:2]
        assert best["token"] == step["token"] == token
        noise = gumbel(3, step["position"], np.array([best["token"], second["token"]]))
        scores = np.array([best["logit"], second["logit"]], np.float32) + noise
        assert scores[0] == np.float32(best["score"]) >= scores[1] == np.float32(second["score"])
        assert [stage["name"] for stage in step["stages"]] == ["temperature", "top_p"]


def test_explain_says_that_it_stops_early(chat_model: str, capsys: Capture) -> None:
    assert explain(chat_model, "hi", "--ignore-eos", "--seed", "1") == 0
    assert "The first 24 tokens; -n N shows more." in capsys.readouterr().err


def test_the_schema_in_the_help_gives_an_answer_worth_showing(smollm2_path: Path, capsys: Capture) -> None:
    example = re.search(r'unspool run ("Bob.*?") --json-schema \'(.*?)\'', EPILOG, re.DOTALL)
    assert example is not None
    arguments = [example[1].strip('"'), "--json-schema", example[2], "--temperature", "0", "-q"]
    assert main(["run", "-m", str(smollm2_path), *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "Bob", "age": 47}


@pytest.mark.parametrize(("arguments", "starts"), [([], True), (["--raw"], False)])
def test_the_process_of_the_template_starts_before_the_weights_load(
    chat_model: str, monkeypatch: pytest.MonkeyPatch, arguments: list[str], starts: bool
) -> None:
    from unspool.chat import template
    from unspool.cli import loading

    order: list[str] = []
    load = loading.load
    monkeypatch.setattr(template, "start_renderer", lambda: order.append("template"))
    monkeypatch.setattr(loading, "load", lambda namespace: order.append("weights") or load(namespace))
    assert main(["run", "-m", chat_model, "-n", "1", "-q", "hi", *arguments]) == 0
    assert order == (["template", "weights"] if starts else ["weights"])
