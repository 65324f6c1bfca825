"""Prompts without a right answer, for what goes wrong in long texts: each topic in several forms.

    open         go on with an essay; in a chat: write one
    open_list    the same, asked for as a numbered list
"""

from __future__ import annotations

from unspool.evaluation.tasks import Item

TOPICS = (
    "the history of bread", "how bridges carry weight", "life in a lighthouse", "why languages change",
    "the water cycle", "a small town in winter", "learning to play the violin", "the first railways",
    "how bees find flowers", "cooking for a large family", "the invention of paper", "walking in the mountains",
    "how clocks work", "a day at a fish market", "the use of maps at sea", "growing tomatoes on a balcony",
    "the letters of a traveller", "how vaccines protect people", "repairing an old bicycle", "the night sky",
    "how a court decides", "the building of a library", "trade along great rivers", "keeping a diary",
)  # fmt: skip
POINTS = ("what it is", "where it comes from", "how it works", "who it matters to", "what may come of it")


def essay(topic: str) -> Item:
    return Item(topic, f"An essay about {topic}.\n\n", f"Write an essay about {topic}.")


def numbered(topic: str) -> Item:
    points = "\n".join(f"{number}. {point}" for number, point in enumerate(POINTS, 1))
    raw = f"Facts about {topic}.\n\n1. There is much to say about {topic}.\n2."
    ask = f"Write about {topic} as a numbered list. For each of these points, write an item:\n{points}"
    return Item(topic, raw, ask)


OPEN = {"open": essay, "open_list": numbered}


def open_items(name: str, limit: int | None) -> list[Item]:
    return [OPEN[name](topic) for topic in TOPICS[:limit]]
