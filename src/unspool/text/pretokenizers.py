"""How text is split into words before byte-pair merging, for every `tokenizer.ggml.pre` that GGUF files name.

A byte-level BPE vocabulary defines the pieces and the order of merges, but not where words end. The model was trained
with one particular rule, a sequence of regular expressions: each splits the pieces of the previous one, both matches
and gaps become pieces, and merges never cross a split. A wrong rule gives ids that the model has hardly seen and an
answer that is only a little worse, so an unknown name is refused, never guessed.

Patterns are the models' own (Oniguruma syntax, Unicode classes). Names are the values found in GGUF files.
"""

from __future__ import annotations

import re
from functools import cache

from unspool.errors import ModelError
from unspool.records import record


@record(frozen=True)
class PreTokenizer:
    """The splitting rule of one family of vocabularies, and two related settings."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is itself a token is used without merging
    adds_bos: bool = False  # where the file does not say


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SYMBOLS}|{_SPACES}"


def _cl100k(numbers: str, spaces: str = _SPACES) -> str:
    """The pattern of most families: contractions, words, numbers, symbols, line ends, spaces."""
    return rf"{_CONTRACTION}|{_WORD}|{numbers}|{_SYMBOLS}[\r\n]*|\s*[\r\n]+|{spaces}"


def _cased(numbers: str, tail: str = _CONTRACTION + "?", after: str = r"[\r\n/]*") -> str:
    """Words split where lower case turns to upper: `camelCase` is two words."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{lead}{_UPPER}*{_LOWER}+{tail}|{lead}{_UPPER}+{_LOWER}*{tail}"
    return rf"{words}|{numbers}|{_SYMBOLS}{after}|\s*[\r\n]+|{_SPACES}"


_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES
)
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, _PUNCTUATED)
_DIGITS_GPT2 = (r"\p{N}", _GPT2)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# Numbers split in threes from the right. The models' own patterns look ahead from every digit to the number's end,
# which takes quadratic time: 50,000 digits took 11 s. These look once. After a group of three (`\G`: where the last
# match ended) another must follow, because the rest of the number is whole groups. A test compares them with the
# originals.
_DIGITS_FROM_THE_RIGHT = r"\G(?<=\p{N})\p{N}{3}|\p{N}{1,3}(?=(?>(?:\p{N}{3})*)(?!\p{N}))"
_DIGITS_OF_WORDS_FROM_THE_RIGHT = r"\G(?<=\d)\d{3}|(?<!\d)\d{1,3}(?=(?>(?:\d{3})*)\b)"
_BEFORE_GROUPS = (  # with what else counts as a number behind them: only the front of a group is a cut
    r"(?:\G(?<=\d)\d{3}|\d{3}(?=(?>(?:\d{3})*)(?!\d)))(?:\D(?:(?!(?>(?:\d{3})+)(?!\d)).)*)?"
)

# Cased letters as DeepSeek's first tokenizer lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_NOT_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|\s*[\r\n]+|{_SPACES}"
)

DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (DEFAULT, "default"),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 mpt olmo jais trillion granite-docling phi-2 gigachat a.x-4.0 mellum exaone4 jina-es jina-de jina-v1-en "
        "jina-v2-es jina-v2-de jina-v2-code modern-bert roberta-bpe",
    ),
    (PreTokenizer(_DIGITS_GPT2), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    (
        PreTokenizer((_QWEN2,)),
        "qwen2 stablelm2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan grok-2 solar-open",
    ),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
                rf"|\s*[\r\n]+|{_SPACES}",
            )
        ),
        "qwen35",
    ),
    (PreTokenizer(("[^\\n]+|[\\n]+", _QWEN2)), "laguna"),
    (PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|\s*[\r\n]+|{_SPACES}",)), "ufakzeka"),
    (PreTokenizer((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True), "minicpm5"),
    (
        PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",)),
        "seed-coder",
    ),
    (
        PreTokenizer((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|\s*[\r\n]|{_SPACES}",)),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (
        PreTokenizer(
            (
                _cl100k(
                    r"\p{N}{1,3}",
                    "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s{1}",
                ),
            )
        ),
        "jais-2",
    ),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"|{_SYMBOLS}[\r\n/]?|\s*[\r\n]|{_SPACES}",
            )
        ),
        "exaone-moe",
    ),
    (PreTokenizer((_cased(r"\p{N}", tail=""),), ignore_merges=True, adds_bos=True), "tekken"),
    (PreTokenizer((_cased(r"\p{N}{1,3}"),)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((_cased(r"\p{N}{1,3}"),), ignore_merges=True), "granite-embed-multi-97m"),
    (PreTokenizer((_DIGITS_OF_WORDS_FROM_THE_RIGHT, _cased(r"\p{N}{1,3}"))), "tiny_aya cohere2moe"),
    (
        PreTokenizer(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
                f"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_CJK}",
                _cased(r"\p{N}"),
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (PreTokenizer((_KIMI,)), "kimi-k2"),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")), "deepseek-coder"),
    (PreTokenizer(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (
        PreTokenizer(
            (r"\p{N}{1,3}", _CJK, _PUNCTUATED.replace(r"[\r\n]*|\s*[\r\n]+|", r"|[\r\n]|"), r"\p{N}"),
        ),
        "spark2_5",
    ),
    (
        PreTokenizer(
            (
                _DIGITS_FROM_THE_RIGHT,
                "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
                "\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
                _PUNCTUATED,
            )
        ),
        "afmoe",
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (PreTokenizer((r"\p{N}+", _BEFORE_GROUPS)), "superbpe"),
    (
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
        ),
        "chameleon",
    ),
)

# These vocabularies merge characters over a whole text, without splitting it first.
CHARACTER_PAIRS = frozenset({"gemma4", "sarvam-moe", "granite-embed-multi-311m"})

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rule for rule, names in _FAMILIES for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rule of that name; an unknown name is refused, because a guess would be wrong in silence."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise ModelError(f"tokenizer.ggml.pre: unknown pre-tokenizer {name!r}") from None


# --- ASCII -------------------------------------------------------------------------------------------------------
# Unicode's classes within ASCII.
_ASCII = {
    "L": "A-Za-z", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": "", "N": "0-9",
    "P": r"!\"#%&'()*,\-./:;?@\[\\\]_{}", "S": r"$+<=>\^`|~",
}  # fmt: skip
_PIECE = re.compile(r"\\p\{(\w+)\}|\\.|\[\^?|\]|[^\\\[\]]+", re.DOTALL)
# Where Oniguruma and Python differ, or may differ: word boundaries, intersections, the last match's end; and ends of
# lines.
_OTHERWISE = (r"\b", "&&", r"\G")


@cache
def _ascii_patterns(rule: PreTokenizer) -> tuple[re.Pattern[str], ...] | None:
    """The rule's patterns for Python's `re`, which give the same result on ASCII text; None if one cannot be
    converted."""
    patterns = []
    for pattern in rule.patterns:
        parts, in_class = [], False
        for match in _PIECE.finditer(pattern):
            part = match[0]
            if match[1] is not None:
                if match[1] not in _ASCII:
                    return None
                part = _ASCII[match[1]]
                part = part if in_class else f"[{part}]" if part else r"[^\s\S]"
            elif part == "]" or part.startswith("["):
                in_class = part != "]"
            elif "$" in part and not in_class and part != r"\$":
                return None
            parts.append(part)
        if any(sign in pattern for sign in _OTHERWISE):
            return None
        patterns.append(re.compile("".join(parts), re.ASCII))
    return tuple(patterns)


def cut_ascii(rule: PreTokenizer, text: str) -> list[str] | None:
    """The words of an ASCII text, exactly as the library splits it; None for rules that need the library."""
    patterns = _ascii_patterns(rule)
    if patterns is None:
        return None
    words = [text]
    for pattern in patterns:
        pieces: list[str] = []
        for word in words:
            begin = 0
            for match in pattern.finditer(word):
                start, end = match.span()
                pieces += (word[begin:start], word[start:end])
                begin = end
            pieces.append(word[begin:])
        words = list(filter(None, pieces))
    return words
