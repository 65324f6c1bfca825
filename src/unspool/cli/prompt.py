"""Reads a prompt, and decides whether it is a conversation."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from unspool.cli.parser import UsageError

if TYPE_CHECKING:
    from unspool.llm import TextModel
    from unspool.options import Messages


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the prompt")
    group.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text; - (or nothing, with a pipe) reads stdin")
    group.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    group.add_argument("--system", metavar="TEXT", help="a system message before the prompt")


def read_prompt(namespace: argparse.Namespace, example: str = 'unspool run "Why is the sky blue?"') -> str:
    """The prompt from the command line or from stdin, without the last newline of stdin."""
    prompt: str | None = namespace.prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError(f"no prompt: {example}, or pipe one in")
    if prompt in (None, "-"):
        data = sys.stdin.buffer.read()
        try:
            prompt = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UsageError(f"stdin is not UTF-8: byte {data[error.start]:#04x} at {error.start:,}") from None
    assert prompt is not None
    if not prompt:
        raise UsageError(f"the prompt is empty; give one, as in {example}")
    if namespace.raw and namespace.system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out")
    if not namespace.raw:
        from unspool.chat.template import start_renderer

        start_renderer()  # while the weights load
    return prompt


def as_asked(llm: TextModel, prompt: str, namespace: argparse.Namespace) -> str | Messages:
    """A conversation if the model has a chat template; otherwise, and with --raw, the text unchanged."""
    if namespace.raw or (llm.template is None and namespace.system is None):
        return prompt
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    if namespace.system is not None:
        messages.insert(0, {"role": "system", "content": namespace.system})
    return messages
