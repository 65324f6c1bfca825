"""The loop of a chat and its /commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unspool.cli import flags
from unspool.cli.answer import respond
from unspool.cli.conversation import Conversation
from unspool.cli.reading import Reader
from unspool.cli.report import summary
from unspool.cli.terminal import AnswerWriter, note, note_term, styled, warn
from unspool.errors import ContextLengthError, RequestError, UnspoolError
from unspool.params import ResolvedParams
from unspool.suggest import nearest

if TYPE_CHECKING:
    from unspool.chat.template import ChatTemplate
    from unspool.cli.chat import ModelInUse
    from unspool.llm import LLM
    from unspool.results import Result

# Name -> (argument, what it does); the order is /help's.
COMMANDS: dict[str, tuple[str, str]] = {
    "help": ("", "this list"),
    "retry": ("", "answer the last message again"),
    "undo": ("", "take back the last message and its answer"),
    "clear": ("", "forget the conversation; the system message stays"),
    "system": ("[TEXT]", "show or set the system message; /system - removes it"),
    "set": ("[NAME [VALUE]]", "set a parameter, as in /set temperature 0.2; without VALUE, back to its default"),
    "params": ("", "the parameters in force, and who set each"),
    "model": ("[NAME]", "the model, or go on with another one"),
    "save": ("FILE", "write the conversation as JSON"),
    "load": ("FILE", "go on with a saved conversation"),
    "quit": ("", "leave (so does Ctrl-D)"),
}


class Talk:
    def __init__(
        self,
        model: ModelInUse,
        conversation: Conversation,
        values: dict[str, Any],
        *,
        quiet: bool,
        wants_status: bool | None = None,
    ) -> None:
        self._model, self.conversation = model, conversation
        self.flags = tuple(flag for flag in flags.FLAGS if flag.is_interactive)
        self._values, self._quiet, self._wants_status = values, quiet, wants_status
        self._shown_warnings: set[str] = set()

    @property
    def llm(self) -> LLM:
        return self._model.llm

    def greet(self) -> None:
        name, context = self.llm.checkpoint.name, self.llm.engine.context_length
        note(f"{name} · context {context:,} tokens · /help for commands, Ctrl-D to leave")

    def run(self, reader: Reader) -> int:
        """Run turns until the end of input or /quit. On a terminal, a failure ends only its turn."""
        status = 0
        while True:
            try:
                line = reader.read().strip()
            except EOFError:
                if reader.is_terminal:
                    print()
                return status
            except KeyboardInterrupt:
                print()  # the typed text is discarded
                continue
            if not line:
                continue
            if line == "/quit" or line == "/exit":
                return status
            try:
                self._take(line)
            except UnspoolError as error:
                note(f"unspool: {error}", "red")
                status = 0 if reader.is_terminal else 2
            except KeyboardInterrupt:
                print()

    def _take(self, line: str) -> None:
        if line.startswith("/") and "\n" not in line:  # a text of several lines is always a message
            self._command(line)
        else:
            self._ask(line)

    # Asking ---------------------------------------------------------------------------------------------------------
    def _ask(self, content: str) -> None:
        params = flags.sampling_params(self._values)
        self.conversation.say("user", content)
        try:
            messages, writer = self.conversation.messages(), AnswerWriter()
            answer = respond(
                self.llm, messages, params, lambda _, text: writer.write(text), wants_status=self._wants_status
            )
        except ContextLengthError as error:
            self.conversation.take_back()
            note(f"unspool: {error}", "red")
            note("The message was not sent. /clear starts anew, /undo takes back the exchange before it.")
            return
        except (UnspoolError, KeyboardInterrupt):
            self.conversation.take_back()
            raise
        if not answer.result.text.endswith("\n"):
            writer.write("\n")
        self.conversation.say("assistant", answer.result.text)
        self._show_notes(answer.result)

    def _show_notes(self, result: Result) -> None:
        for warning in result.warnings:
            if warning not in self._shown_warnings:  # once per chat
                self._shown_warnings.add(warning)
                warn(warning)
        used, context = result.usage.total_tokens, self.llm.engine.context_length
        if result.finish_reason == "length" and used >= context:
            note(f"The answer is cut: the context is full, {used:,} of {context:,} tokens. /clear or /undo.", "yellow")
        if not self._quiet:
            note(f"{summary(result)} · context {used:,} of {context:,}")

    # Commands -------------------------------------------------------------------------------------------------------
    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "retry": self._retry,
            "undo": self._undo,
            "clear": self._clear,
            "system": self._system,
            "set": self._set,
            "params": self._params,
            "model": self._switch,
            "save": self._save,
            "load": self.load,
        }
        if name not in commands:
            hint = nearest(f"/{name}", [f"/{one}" for one in COMMANDS], "/help lists them")
            note(f"/{name} is not a command{hint}", "red")
        elif COMMANDS[name][0] == "FILE" and not rest.strip():
            note(f"/{name} FILE {COMMANDS[name][1]}", "red")
        else:
            commands[name](rest.strip())

    def _help(self, rest: str) -> None:
        for name, (argument, meaning) in COMMANDS.items():
            note_term(f"/{name} {argument}".rstrip(), meaning)
        note('A line that ends in \\ goes on in the next; """ opens a text of several lines that """ closes.')
        note("Ctrl-C stops an answer. Tab completes commands and parameters.")

    def _retry(self, rest: str) -> None:
        content = self.conversation.take_back()
        if content is None:
            note("There is nothing to answer again.")
            return
        if "seed" in self._values:
            note("The seed is set, so the answer will be the same; /set seed lets each answer draw its own.")
        self._ask(content)

    def _undo(self, rest: str) -> None:
        content = self.conversation.take_back()
        note("There is nothing to take back." if content is None else f"Taken back: {_short(content)}")

    def _clear(self, rest: str) -> None:
        self.conversation.turns.clear()
        note("A new conversation.")

    def _system(self, rest: str) -> None:
        if rest:
            self.conversation.system = None if rest == "-" else rest
        system = self.conversation.system
        if system is not None:
            note(f"System message: {system}")
            return
        own = None if self.llm.template is None else own_system_message(self.llm.template)
        note("There is no system message." if own is None else f"None is set; the model's template adds its own: {own}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            note("Names: " + " ".join(flag.key for flag in self.flags))
            return
        flag = flags.find(name, self.flags)
        if flag is None:
            hint = nearest(name, [flag.key for flag in self.flags], "/set lists them")
            note(f"{name} is not a parameter{hint}", "red")
            return
        changed = {key: old for key, old in self._values.items() if key != flag.key}
        if value.strip():
            try:
                changed[flag.key] = flags.value_of(flag, value.strip())
            except argparse.ArgumentTypeError as error:
                note(f"{flag.key}: {error}", "red")
                return
        flags.sampling_params(changed)  # raises for invalid values, before anything is changed
        self._values = changed
        message = f"{flag.key} = {changed[flag.key]!r}" if flag.key in changed else f"{flag.key} is back to its default"
        note(message)

    def _params(self, rest: str) -> None:
        checkpoint = self.llm.checkpoint
        params = flags.sampling_params(self._values)
        resolved = params.resolve(checkpoint.generation, vocab_size=checkpoint.config.vocab_size, draw_seed=lambda: 0)
        for line in parameter_lines(resolved):
            note(line)

    def _switch(self, rest: str) -> None:
        if rest:
            self._model.exchange(rest)
        self.greet()
        if not rest:
            from unspool.weights.installed import installed

            note("Here are: " + ", ".join(dict.fromkeys(model.name for model in installed())))

    def _save(self, rest: str) -> None:
        self.conversation.save(rest, model=self.llm.checkpoint.name)
        note(f"Saved {len(self.conversation.turns)} messages to {rest}")

    def load(self, path: str) -> None:
        self.conversation.load(path)
        note(f"Loaded {len(self.conversation.turns)} messages from {path}")
        for turn in self.conversation.turns[-2:]:
            note(f"  {turn['role']}: {_short(turn['content'])}")


def parameter_lines(resolved: ResolvedParams) -> list[str]:
    """The values that were set, then the defaults that affect a draw."""
    shown = resolved.as_dict()
    lines = []
    for name, entry in shown.items():
        if entry["origin"] == "drawn":
            lines.append(f"  {name:<22}drawn for each answer")
        elif entry["origin"] != "default" or name in ("temperature", "top_k", "top_p", "min_p", "max_tokens"):
            lines.append(f"  {name:<22}{entry['value']!s:<16} {styled(entry['origin'], 'cyan', sys.stderr)}")
    return lines


def own_system_message(template: ChatTemplate) -> str | None:
    """A template's default system message; None if it has none, or refuses system messages. It is found between the
    same two texts that surround a given system message."""
    system, user = "qx-system-message", "qx-user-message"
    message = {"role": "user", "content": user}
    try:
        with_one = template.render([{"role": "system", "content": system}, message])
        without = template.render([message])
    except RequestError:
        return None
    before, found, rest = with_one.partition(system)
    after, found_too, _ = rest.partition(user)
    if not (found and found_too and after and without.startswith(before)):
        return None
    own, found, _ = without[len(before) :].partition(after + user)
    return own.strip() if found and own.strip() else None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 72 else line[:71] + "…"


