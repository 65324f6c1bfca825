"""How a notebook shows a result: tokens tinted by their probability, with numbers and trace on hover.

Everything that a model wrote is escaped: an answer is text, never markup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Protocol

from unspool.events import Token

Spell = Callable[[int], str]
MAX_TOKENS = 2000  # of one answer that are shown one by one


class Answer(Protocol):
    """What is shown of one answer."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> Sequence[Token]: ...
    @property
    def logprobs(self) -> list[float] | None: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def seed(self) -> int | None: ...


def as_html(answers: Sequence[Answer], spell: Spell | None, about: str) -> str:
    """One block for each answer, and a line about all. `spell` gives a token's text; without it there are no tints."""
    blocks = "".join(_block(answer, spell) for answer in answers)
    return f'<div class="unspool-result">{blocks}<div style="opacity:.6;font-size:85%">{escape(about)}</div></div>'


def _block(answer: Answer, spell: Spell | None) -> str:
    if spell is not None and answer.logprobs is not None:
        shown = "".join(_token(each, spell) for each in answer.tokens[:MAX_TOKENS])
        shown += "…" if len(answer.tokens) > MAX_TOKENS else ""
    else:
        shown = escape(answer.text)
    ending = f"{len(answer.tokens):,} tokens · {answer.finish_reason} · seed {answer.seed}"
    return (
        f'<div style="white-space:pre-wrap;line-height:1.6">{shown}</div>'
        f'<div style="opacity:.6;font-size:85%">{escape(ending)}</div>'
    )


def _token(token: Token, spell: Spell) -> str:
    """Likely tokens have no tint, unlikely ones a strong one."""
    logprob = token.logprob if token.logprob is not None else 0.0
    tint = min(0.6, max(0.0, -logprob) / 8)
    return (
        f'<span title="{escape(_details(token, spell), quote=True)}" '
        f'style="background:rgba(230,120,0,{tint:.2f})">{escape(spell(token.id))}</span>'
    )


def _details(token: Token, spell: Spell) -> str:
    lines = [f"{spell(token.id)!r} (id {token.id})"]
    if token.logprob is not None:
        lines.append(f"p {math.exp(token.logprob):.4f}, rank {token.rank}")
    lines += [f"{math.exp(logprob):.4f}  {spell(id)!r}" for id, logprob in token.top if id != token.id]
    if token.trace is not None:
        lines.append(f"entropy {token.trace.entropy_bits:.2f} bits")
        lines += [f"{each.name}: {each.survivors:,} left, {each.mass:.1%}" for each in token.trace.stages]
        best = token.trace.candidates[0]
        lines.append(f"draw: {best.logit:.2f} {best.gumbel:+.2f} = {best.score:.2f}")
    return "\n".join(lines)
