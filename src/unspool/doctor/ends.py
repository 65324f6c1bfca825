"""End tokens and the chat template: why a model never stops, or answers as if it had not been asked."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unspool.doctor.finding import Finding
from unspool.doctor.subject import ANSWER, Rendered, Subject
from unspool.errors import UnspoolError

# How control tokens are spelled in templates: <|im_end|>, <start_of_turn>, [INST], <s>.
CONTROL = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?[a-z]+(?:_[a-z]+)+>|\[/?[A-Z][A-Z_]{2,30}\]")


def check_end_tokens(subject: Subject) -> Iterator[Finding]:
    if not subject.end_ids:
        yield Finding(
            "end-token-missing", "error", "certain", "no end token: the model's files name none",
            "answers never end by themselves; each runs into its limit",
            "set eos_token_id (config.json, generation_config.json, or tokenizer.ggml.eos_token_id in a GGUF file)",
        )  # fmt: skip
    elif subject.pad_id in subject.end_ids:
        yield Finding(
            "end-is-padding", "note", "certain",
            f"the padding token is the end token {subject.name_of(subject.pad_id)}",
            "nothing here; a model that is fine-tuned with these files may not learn to stop, for padding is masked",
            "before training, set a padding token of its own",
        )  # fmt: skip


def check_end_of_turn(subject: Subject) -> Iterator[Finding]:
    """The control token that the template writes behind an assistant's message must end an answer."""
    rendered = subject.rendered
    if not isinstance(rendered, Rendered):
        return
    behind = _control_behind_answer(subject, rendered)
    if behind is not None and behind not in subject.end_ids and subject.end_ids:
        ends = ", ".join(subject.name_of(token) for token in sorted(subject.end_ids))
        yield Finding(
            "end-of-turn-not-an-end", "error", "likely",
            f"the chat template ends a turn with {subject.name_of(behind)}, which is not an end token ({ends})",
            "chat answers do not stop: the model goes on and writes the user's next message itself",
            f"add {behind} to eos_token_id in generation_config.json "
            "(beside a GGUF file: NAME.generation_config.json), or pass it as a stop token",
        )  # fmt: skip


def _control_behind_answer(subject: Subject, rendered: Rendered) -> int | None:
    """The first control token after the assistant's text, unless other text comes before it."""
    written = ""
    for index, token in enumerate(rendered.ids):
        if token in subject.tokenizer.special_ids:
            if ANSWER in written:
                return token
            written = ""
        else:
            written = subject.tokenizer.decode(rendered.ids[max(0, index - 24) : index + 1])
    return None


def check_template(subject: Subject) -> Iterator[Finding]:
    rendered = subject.rendered
    if isinstance(rendered, UnspoolError):
        yield Finding(
            "template-fails", "error", "certain", f"the chat template fails on a short conversation: {rendered}",
            "every chat request is refused", "give a working one (chat_template.jinja in the directory)",
        )  # fmt: skip
    if not isinstance(rendered, Rendered):
        return
    yield from _doubled_start(subject, rendered)
    unknown = sorted({name for name in CONTROL.findall(rendered.text) if not _is_token(subject, name)})
    if unknown:
        yield Finding(
            "template-not-in-vocabulary", "warning", "likely",
            f"the chat template writes {', '.join(map(repr, unknown[:6]))}, which the vocabulary does not have",
            "the model sees these marks as ordinary characters, so turns blur: it may ignore the system message or "
            "answer in the wrong role",
            "use the template that was trained with this vocabulary",
        )  # fmt: skip
    if not _shows_tools(subject):
        yield Finding(
            "template-drops-tools", "note", "certain", "the chat template has no place for tools",
            "tools are described in the system message instead; the model was not trained for that form",
            "none is needed unless the model is meant to call tools: then give its tool template",
        )  # fmt: skip


def _doubled_start(subject: Subject, rendered: Rendered) -> Iterator[Finding]:
    bos = subject.tokenizer.bos_id
    leading = [token == bos for token in rendered.ids[:2]]
    if bos is not None and leading == [True, True]:
        yield Finding(
            "start-doubled", "warning", "certain",
            f"the chat template writes the start token {subject.name_of(bos)} twice",
            "unspool sends it once; engines that do not correct it give slightly worse answers",
            "write it once in the template",
        )  # fmt: skip
    elif bos is not None and leading[:1] == [True] and subject.tokenizer.adds_bos:
        yield Finding(
            "start-in-template-and-tokenizer", "note", "certain",
            f"both the chat template and the tokenizer write the start token {subject.name_of(bos)}",
            "nothing here: unspool sends it once; some engines send it twice",
            "none is needed",
        )  # fmt: skip


def _is_token(subject: Subject, name: str) -> bool:
    return len(subject.tokenizer.encode(name, add_special=False, parse_special=True)) == 1


def _shows_tools(subject: Subject) -> bool:
    from unspool.chat.model_chat import ModelChat
    from unspool.chat.template import template_of

    try:
        template = template_of(subject.checkpoint, subject.tokenizer)
        return ModelChat(subject.checkpoint.name, subject.tokenizer, template).shows_tools
    except UnspoolError:
        return False


CHECKS = (check_end_tokens, check_end_of_turn, check_template)
