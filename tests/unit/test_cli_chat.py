"""`unspool chat`: turns, commands, interruptions; through a pipe, and once through a terminal."""

from __future__ import annotations

import codecs
import fcntl
import io
import json
import os
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unspool.chat.template import ChatTemplate
from unspool.cli import main
from unspool.cli.conversation import Conversation
from unspool.cli.reading import Reader
from unspool.cli.talk import own_system_message
from unspool.errors import RequestError
from unspool.models.checkpoint import Checkpoint

Capture = pytest.CaptureFixture[str]
OPTIONS = ["--device", "reference", "--kv-tokens", "4096", "--allowed-token-ids", "97,98", "--seed", "5", "-n", "4"]


@pytest.fixture
def chat(own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Any:
    """chat(model, typed, *arguments) -> (status, stdout, stderr)"""

    def run(model: str, typed: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = main(["chat", "-m", model, *OPTIONS, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_each_line_is_a_turn(chat: Any, chat_model: str) -> None:
    status, out, err = chat(chat_model, "hello\n\nagain\n")
    assert status == 0
    first, second = out.splitlines()
    assert len(first) == len(second) == 4
    assert err.count("4 tokens · first after ") == 2
    used = len("user: hello\nassistant: \nuser: again\nassistant: \n") + 7  # the second prompt has the first answer
    assert f"context {used:,} of 4,096" in err
    assert chat(chat_model, "hello\n\nagain\n", "--quiet") == (0, out, "")


def test_the_model_sees_the_whole_conversation(chat: Any, chat_model: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    status, out, _ = chat(chat_model, f"one\ntwo\n/save {path}\n", "--system", "be brief")
    assert status == 0
    answers = out.splitlines()
    saved = json.loads(path.read_text())
    assert saved["model"] == "tiny-chat"
    assert saved["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": answers[0]},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": answers[1]},
    ]
    # Gone on with: undone by one exchange and asked again, the answer is the same, for it is a function of its input.
    assert chat(chat_model, "/undo\ntwo\n", "--load", str(path))[1].splitlines() == [answers[1]]
    assert chat(chat_model, f"/load {path}\n/retry\n")[1].splitlines() == [answers[1]]


def test_a_chat_goes_on_with_another_model(chat: Any, chat_model: str, short_model: str, base_model: str) -> None:
    status, out, err = chat(chat_model, f"hello\n/model {short_model}\nagain\n/model\n")
    assert status == 0
    assert len(out.splitlines()) == 2
    assert err.count("tiny-short · context 96 tokens") == 2
    assert "Here are: " in err
    used = len("user: hello\nassistant: \nuser: again\nassistant: \n") + 7
    assert f"context {used} of 96" in err, "the second model saw both turns"
    for wrong, text in ((short_model + "x", "does not exist; did you"), (base_model, "tiny-base has no chat template")):
        status, out, err = chat(chat_model, f"/model {wrong}\nhello\n")
        assert status == 2, "of a pipe; in a terminal it costs the turn alone"
        assert text in err
        assert len(out.splitlines()) == 1, "the chat goes on with the model that it has"


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(
    chat: Any, chat_model: str, short_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unspool.cli import loading

    load = loading.load

    def failing(namespace: Any) -> Any:
        if namespace.model == short_model:
            raise MemoryError("9 GB")
        return load(namespace)

    monkeypatch.setattr(loading, "load", failing)
    _, out, err = chat(chat_model, f"/model {short_model}\nhello\n")
    assert f"{short_model} takes more memory than there is; {chat_model} is loaded again" in err
    assert len(out.splitlines()) == 1


def test_what_is_mistyped_is_answered_with_the_nearest(chat: Any, chat_model: str) -> None:
    _, _, err = chat(chat_model, "/quti\n/hlep\n/set tempature 1\n/xyzzy\n")
    assert "/quti is not a command; did you mean '/quit'?" in err
    assert "/hlep is not a command; did you mean '/help'?" in err
    assert "tempature is not a parameter; did you mean 'temperature'?" in err
    assert "/xyzzy is not a command; /help lists them" in err


def test_commands_speak_on_stderr(chat: Any, chat_model: str) -> None:
    typed = "/help\n/undo\n/retry\n/clear\n/system\n/system be kind\n/system -\n/set\n/params\n/nonsense\n/save\n"
    status, out, err = chat(chat_model, typed)
    assert (status, out) == (0, "")
    for line in (
        "/retry                  answer the last message again",
        "There is nothing to take back.",
        "There is nothing to answer again.",
        "A new conversation.",
        "There is no system message.",
        "System message: be kind",
        "Names: max_tokens min_tokens stop",
        "seed                  5                request",
        "/nonsense is not a command; /help lists them",
        "/save FILE write the conversation as JSON",
    ):
        assert line in err


def test_set_changes_the_next_answer(chat: Any, chat_model: str) -> None:
    typed = "hello\n/clear\n/set max_tokens 2\nhello\n/clear\n/set max-tokens\n/set ignore_eos on\n"
    status, out, err = chat(chat_model, typed)
    assert status == 0
    first, second = out.splitlines()
    assert second == first[:2]
    assert "max_tokens = 2" in err
    assert "max_tokens is back to its default" in err
    assert "ignore_eos = True" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set top_p 1.5", "top_p is 1.5; allowed"),
        ("/set top_p high", "top_p: 'high' is not a number"),
        ("/set ignore_eos perhaps", "'perhaps' is neither on nor off"),
        ("/set tempo 1", "tempo is not a parameter"),
        ("/load ./nowhere.json", "./nowhere.json cannot be read: No such file"),
        ("/save ./nowhere/talk.json", "./nowhere/talk.json cannot be written: No such file"),
    ],
)
def test_a_mistake_changes_nothing(line: str, message: str, chat: Any, chat_model: str) -> None:
    plain = chat(chat_model, "hello\n")[1]
    _, out, err = chat(chat_model, f"{line}\nhello\n")
    assert message in err
    assert out == plain


def test_a_parameter_that_is_wrong_leaves_no_turn(chat: Any, chat_model: str) -> None:
    """A bias for a token that does not exist is seen only with the model; the message is not kept."""
    _, out, err = chat(chat_model, "/set logit_bias 5000=1\nhello\n/set logit_bias\nhello\n")
    assert "logit_bias names token 5000" in err
    assert out == chat(chat_model, "hello\n")[1]


def test_what_does_not_fit_is_told_with_numbers(chat: Any, short_model: str) -> None:
    status, out, err = chat(short_model, f"hello\n{'x' * 200}\n/params\nhello\n")
    assert status == 0
    assert "tokens. This model's maximum context length is 96 tokens" in err
    assert "The message was not sent. /clear starts anew" in err
    assert len(out.splitlines()) == 2, "the conversation goes on without it"


def test_an_answer_cut_by_the_context_says_so(chat: Any, short_model: str) -> None:
    _, _, err = chat(short_model, "/set max_tokens\nhello\n", "--ignore-eos")
    assert "The answer is cut: the context is full, 96 of 96 tokens." in err


def test_ctrl_c_stops_the_answer_and_not_the_chat(
    chat: Any, chat_model: str, interrupt_at: Callable[..., None]
) -> None:
    interrupt_at(2)
    status, out, err = chat(chat_model, "hello\nagain\n")
    assert status == 0
    assert [len(line) for line in out.splitlines()] == [2, 4]
    assert err.count("interrupted") == 1


def test_a_model_without_a_template_cannot_chat(chat: Any, base_model: str) -> None:
    status, _, err = chat(base_model, "hello\n")
    assert status == 2
    assert "tiny-base has no chat template" in err


# Messages of several lines -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("one\n", "one"),
        ("one\\\ntwo\\\nthree\n", "one\ntwo\nthree"),
        ('"""one\ntwo"""\n', "one\ntwo"),
        ('"""\none\n\n  two\n"""\n', "one\n\n  two"),
        ('"""one"""\n', "one"),
    ],
)
def test_reading(typed: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    reader = Reader(tmp_path / "history")
    assert reader.read() == message
    with pytest.raises(EOFError):
        reader.read()


# Conversations -----------------------------------------------------------------------------------------------------
def test_taking_back() -> None:
    talk = Conversation("be brief")
    assert talk.take_back() is None
    for role, content in (("user", "a"), ("assistant", "b"), ("user", "c")):
        talk.say(role, content)
    assert talk.take_back() == "c"
    assert talk.take_back() == "a"
    assert talk.messages() == [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    "content", ["{", "3", '{"turns": []}', '[{"role": "user"}]', '[{"role": "tool", "content": ""}]']
)
def test_what_is_no_conversation(content: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(content)
    talk = Conversation("kept")
    with pytest.raises(RequestError, match=r"talk\.json"):
        talk.load(str(path))
    assert talk.system == "kept"


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("{% if messages[0].role != 'system' %}<system>Be kind.</>{% endif %}" + TURNS, "Be kind."),
        (TURNS, None),
        ("{% for m in messages %}{{ m.content }} {% endfor %}", None),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{% endfor %}", None),
        ("{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}", None),
    ],
)
def test_a_templates_own_system_message(source: str, own: str | None) -> None:
    assert own_system_message(ChatTemplate(source)) == own


def test_system_tells_what_the_default_models_template_adds(smollm2: Checkpoint) -> None:
    assert smollm2.chat_template is not None
    own = own_system_message(ChatTemplate(smollm2.chat_template))
    assert own == "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


# A terminal --------------------------------------------------------------------------------------------------------
def _as_in_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ^C in it is a signal
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # who was started in the background passes on that it is ignored


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, model: str, cache: Path) -> None:
        self._master, slave = os.openpty()
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TERM": "xterm", "COLUMNS": "100"}
        call = [sys.executable, "-m", "unspool", "chat", "-m", model, "--device", "reference", "--kv-tokens", "60000"]
        call += ["--allowed-token-ids", "97,98", "--seed", "5"]
        self.process = subprocess.Popen(
            call, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=_as_in_a_terminal,
        )  # fmt: skip
        os.close(slave)
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a read may end within a character
        self.seen = self.all = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str, again: str = "") -> None:
        """Reads on until `text` has come. `again` is typed whenever nothing comes for two seconds: a ^C that arrives
        between readline's prompt and its waiting for input is lost, for people too, and they press it again."""
        for _ in range(300):
            while text not in self.seen and select.select([self._master], [], [], 2)[0]:
                read = self._decoder.decode(os.read(self._master, 4096))
                self.seen += read
                self.all += read
            if text in self.seen:
                self.seen = self.seen.partition(text)[2]
                return
            self.type(again)
        raise AssertionError(f"{text!r} did not come; there was {self.seen!r}")

    def close(self) -> int:
        status = self.process.wait(timeout=600)
        os.close(self._master)
        return status


def test_on_a_terminal(chat_model: str, own_cache: Path) -> None:
    terminal = Terminal(chat_model, own_cache.parent)
    terminal.wait_for("/help for commands")
    terminal.wait_for("› ")
    terminal.type("hello\n")
    terminal.wait_for("ab")
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    assert "^C" not in terminal.all, "the key is not written into the answer"
    terminal.wait_for("› ")
    terminal.type("half a line")
    terminal.wait_for("half a line")
    terminal.type("\x03")
    terminal.wait_for("› ", again="\x03")
    terminal.type("/set max_tokens 3\n")
    terminal.wait_for("max_tokens = 3")
    terminal.wait_for("› ")
    terminal.type("/ret\t\n")
    terminal.wait_for("3 tokens")
    terminal.wait_for("› ")
    terminal.type("\x04")
    assert terminal.close() == 0
    history = own_cache / "chat_history"
    assert history.read_text().splitlines() == ["hello", "/set max_tokens 3", "/retry "]
    assert history.stat().st_mode & 0o077 == 0


def test_what_is_pasted_is_one_message(chat_model: str, own_cache: Path, tmp_path: Path) -> None:
    """The terminal marks a paste; its lines end in \\r, as if each were typed."""
    terminal = Terminal(chat_model, own_cache.parent)
    terminal.wait_for("› ")
    terminal.type("/set max_tokens 3\n")
    terminal.wait_for("max_tokens = 3")
    terminal.wait_for("› ")
    terminal.type("\x1b[200~one\r/two\r\rthree\x1b[201~")
    terminal.wait_for("three")
    terminal.type("\n")
    terminal.wait_for("3 tokens")
    terminal.wait_for("› ")
    terminal.type(f"/save {tmp_path}/talk.json\n")
    terminal.wait_for("Saved 2 messages")
    terminal.wait_for("› ")
    terminal.type("\x04")
    assert terminal.close() == 0
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved["messages"][0]["content"] == "one\n/two\n\nthree"
