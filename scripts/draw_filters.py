"""Draw docs/filters.svg: what each stage does to one real distribution (SmolLM2's next token after a line of prose).

    python scripts/draw_filters.py --out docs/filters.svg

The logits are tests/fixtures/smollm2/logits.npz (`english`); the words come from the default model's tokenizer.
"""

from __future__ import annotations

import argparse
from html import escape
from pathlib import Path

import numpy as np

from unspool import LLM
from unspool.sampling import filters

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The old harbour was quiet in the morning, and the fishermen were already mending their nets when …"
PANELS: tuple[tuple[str, str, float], ...] = (
    ("temperature", "temperature 0.5: the likely become likelier", 0.5),
    ("temperature", "temperature 1.5: differences shrink", 1.5),
    ("top_k", "top_k 5: the five best, whatever they hold", 5),
    ("top_p", "top_p 0.9: the fewest that hold 90%", 0.9),
    ("min_p", "min_p 0.1: at least a tenth of the best", 0.1),
    ("typical_p", "typical_p 0.2: nearest the mean information first", 0.2),
    ("top_n_sigma", "top_n_sigma 1: within one σ of the best logit", 1.0),
    ("xtc", "xtc_threshold 0.1, when it acts: the top choices but the last go", 0.1),
)
NUM_TOKENS = 14
WIDTH, HEIGHT, BAR, LEFT = 430, 150, 24, 30
GREY, BLUE, RED, INK = "#c9ced6", "#2f6fde", "#d0453e", "#1d2430"


def probabilities(row: np.ndarray) -> np.ndarray:
    weight = filters.weights(row)
    return weight / weight.sum()


def panel(x: int, y: int, title: str, words: list[str], before: np.ndarray, after: np.ndarray, kept: str) -> list[str]:
    """Grey: the model's own probability. Blue: after the stage. A red word was removed."""
    scale = (HEIGHT - 52) / 0.6
    floor = y + HEIGHT - 34
    parts = [f'<text x="{x + LEFT}" y="{y + 12}" font-weight="600">{escape(title)}</text>']
    parts.append(f'<text x="{x + LEFT}" y="{y + 27}" fill="#69717f">{escape(kept)}</text>')
    for i, word in enumerate(words):
        left = x + LEFT + i * (BAR + 4)
        for value, colour, offset, width in ((before[i], GREY, 0, BAR), (after[i], BLUE, 6, BAR - 12)):
            height = max(0.6, value * scale) if value > 0 else 0
            place = f'x="{left + offset}" y="{floor - height:.1f}" width="{width}" height="{height:.1f}"'
            parts.append(f'<rect {place} fill="{colour}"/>')
        colour = INK if after[i] > 0 else RED
        parts.append(
            f'<text x="{left + BAR / 2}" y="{floor + 12}" fill="{colour}" font-size="9" text-anchor="end" '
            f'transform="rotate(-40 {left + BAR / 2} {floor + 12})">{escape(word)}</text>'
        )
    return parts


def picture(row: np.ndarray, tokenizer: object) -> str:
    top = filters.ranking(row)[:NUM_TOKENS]
    words = [tokenizer.token_text(int(token)).strip() or "␣" for token in top]  # type: ignore[attr-defined]
    before = probabilities(row)
    width, height = 2 * WIDTH + 20, (len(PANELS) + 1) // 2 * (HEIGHT + 18) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="12">“{escape(PROMPT)}”</text>',
        f'<text x="{LEFT}" y="36" fill="#69717f">grey: the model · blue: after the stage · red: removed</text>',
    ]
    for i, (stage, title, value) in enumerate(PANELS):
        filtered = getattr(filters, stage)(row, value)
        alive = filtered > -np.inf
        kept = f"{alive.sum():,} of {row.size:,} tokens left, {before[alive].sum():.1%} of the mass"
        x, y = (i % 2) * WIDTH, 56 + (i // 2) * (HEIGHT + 18)
        parts += panel(x, y, title, words, before[top], probabilities(filtered)[top] * alive[top], kept)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "filters.svg")
    options = parser.parse_args()
    row = np.load(ROOT / "tests" / "fixtures" / "smollm2" / "logits.npz")["english.last"]
    options.out.write_text(picture(row, LLM().tokenizer), "utf-8")


if __name__ == "__main__":
    main()
