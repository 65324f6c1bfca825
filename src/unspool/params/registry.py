"""The registry of sampling parameters: one entry each, from which everything that knows parameters is derived.

`python -m unspool.params.generate .` writes from it declared.py (the typed fields of SamplingParams, ResolvedParams and
SamplingOptions) and the tables of docs/sampling.md. Checks, defaults, the command line's flags, the server's fields and
the stages of sampling read it when they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from unspool.params.kinds import (
    Bias,
    Flag,
    Integer,
    Kind,
    Number,
    Order,
    Record,
    Rules,
    Text,
    Texts,
    TokenIds,
    Word,
)
from unspool.params.values import BeamParams, Constraint, RepetitionDetector, ThinkingMarks
from unspool.records import record

MAX_SEED = 2**53 - 1  # larger integers do not survive JSON in every language


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(7), "little") & MAX_SEED


@record(frozen=True, eq=False)
class StageSpec:
    """A step from logits to a token, by name. It runs where one of its parameters is on."""

    name: str
    shapes_draw: bool = False  # does nothing at temperature 0, where there is no draw
    # (row, value of the parameter) -> row; None: the function of this name in sampling.filters, or the Sampler's own.
    function: Callable[[Any, Any], Any] | None = None


@record(frozen=True, kw_only=True)
class Parameter:
    name: str
    kind: Kind
    group: str
    help: str
    details: str = ""  # more for the documents
    default: Any = None  # what holds where neither the request nor the model sets it; None: nothing
    is_set: bool = False  # the field of a request holds the default itself, never None
    derived: str = ""  # where the default comes from, if it is no constant
    hf_key: str = ""  # the field of generation_config.json that holds a model's own default
    gguf_key: str = ""  # the same in a GGUF file, after general.sampling.
    stages: tuple[StageSpec, ...] = ()
    metavar: str = ""
    short: str = ""
    flag: str = ""  # the command line's name for it, where it is not this one
    no_flag: str = ""  # why the command line has no flag for it
    is_local: bool = False  # takes Python objects, so that only the library has it
    is_interactive: bool = True  # makes sense in a chat as well, where an answer is one text on a terminal

    @property
    def unset(self) -> Any:
        """What the field of a request holds where the caller does not give it."""
        return self.default if self.is_set else None

    @property
    def is_from_model(self) -> bool:
        """Whether a model's files may set it."""
        return bool(self.hf_key or self.gguf_key)

    @property
    def is_optional(self) -> bool:
        """Whether it may be None in the parameters in force."""
        return self.default is None and not self.derived


LENGTH = "length and stops"
DRAW = "choosing a token (a model may bring defaults)"
PENALTIES = "penalties"
TOKENS = "which tokens, and what shape"
COUNT = "how many answers, and their noise"
REPORT = "what is reported"
RUNNING = "how the request is run"
GROUPS = (LENGTH, DRAW, PENALTIES, TOKENS, COUNT, REPORT, RUNNING)

ALLOWED = StageSpec("allowed")

PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        name="max_tokens", kind=Integer(0), group=LENGTH, metavar="N", short="-n",
        help="At most this many tokens; without it, until the model ends the answer or the context is full.",
    ),
    Parameter(
        name="min_tokens", kind=Integer(0), group=LENGTH, default=0, metavar="N",
        hf_key="min_new_tokens", stages=(ALLOWED,),
        help="No end token before this many tokens.",
    ),
    Parameter(
        name="stop", kind=Texts(), group=LENGTH, default=(), metavar="TEXT", hf_key="stop_strings",
        help="Strings that end the answer; they are not part of it.",
    ),
    Parameter(
        name="stop_token_ids", kind=TokenIds(), group=LENGTH, default=(), metavar="ID,…",
        help="Tokens that end the answer.",
    ),
    Parameter(
        name="include_stop_str", kind=Flag(), group=LENGTH, default=False, is_set=True,
        help="Keep the stop string that matched in the answer.",
    ),
    Parameter(
        name="skip_special_tokens", kind=Flag(), group=REPORT, default=True, is_set=True,
        no_flag="a terminal shows text",
        help="Leave control tokens out of the text; false shows them, but for the one that ends the answer.",
    ),
    Parameter(
        name="ignore_eos", kind=Flag(), group=LENGTH, default=False, is_set=True,
        help="The model's end tokens do not end the answer.",
    ),
    Parameter(
        name="bad_words", kind=Texts(), group=TOKENS, default=(), metavar="TEXT",
        help="Strings that never appear in the answer.",
        details="Where one appears, the answer is rewound to its start, and the token that began it is removed there.",
    ),
    Parameter(
        name="stop_rules", kind=Rules(), group=LENGTH, default=(), is_local=True, no_flag="it takes Python functions",
        help="Functions of the answer so far that say whether it ends here: [in Python](python.md) alone.",
    ),
    Parameter(
        name="deadline_ms", kind=Number(0, 1e12, above=True), group=LENGTH, metavar="MS",
        help="End the answer this many milliseconds after the request arrived, with finish reason `deadline`.",
    ),
    Parameter(
        name="repetition_detector", group=LENGTH,
        kind=Record(RepetitionDetector, RepetitionDetector.FIELDS),
        help="End the answer when at most `period` (32) tokens came `repeats` (8) times in a row, `length` (0) tokens "
        "or more in all, with finish reason `repetition`.",
    ),
    # What the draw is from
    Parameter(
        # Below 1e-6 a float32 logit could overflow; such a temperature has the effect of 0.
        name="temperature", kind=Number(1e-6, 1e6, also=0), group=DRAW, default=1.0, metavar="T",
        hf_key="temperature", gguf_key="temp", stages=(StageSpec("temperature", shapes_draw=True),),
        help="Divides the logits: below 1 bolder, above 1 more varied; 0 takes the best token.",
        details="`l / T`; at 0 no noise is added, and every stage that shapes a draw is absent.",
    ),
    Parameter(
        name="top_k", kind=Integer(0, 2**31 - 1, also=-1, also_means=0), group=DRAW, default=0, metavar="K",
        hf_key="top_k", gguf_key="top_k",
        stages=(StageSpec("top_k", shapes_draw=True), StageSpec("top_k_ties", shapes_draw=True)),
        help="Keep the k likeliest tokens; 0 or -1 is off.",
    ),
    Parameter(
        name="top_p", kind=Number(0, 1, above=True), group=DRAW, default=1.0, metavar="P",
        hf_key="top_p", gguf_key="top_p", stages=(StageSpec("top_p", shapes_draw=True),),
        help="Keep the fewest likeliest tokens that hold this much of the probability; 1 is off.",
    ),
    Parameter(
        name="min_p", kind=Number(0, 1), group=DRAW, default=0.0, metavar="P", hf_key="min_p", gguf_key="min_p",
        stages=(StageSpec("min_p", shapes_draw=True),),
        help="Drop tokens below this share of the likeliest one's probability; 0 is off.",
        details="Keeps `p ≥ min_p · max p`.",
    ),
    Parameter(
        name="typical_p", kind=Number(0, 1, above=True), group=DRAW, default=1.0, metavar="P", hf_key="typical_p",
        stages=(StageSpec("typical_p", shapes_draw=True),),
        help="Keep the most typical tokens that hold this much of the probability; 1 is off.",
        details="Like `top_p`, but first those whose information `-log p` is nearest the mean, `Σ -p log p`.",
    ),
    Parameter(
        name="top_n_sigma", kind=Number(0, 1e6), group=DRAW, default=0.0, metavar="N",
        stages=(StageSpec("top_n_sigma", shapes_draw=True),),
        help="Keep logits within n standard deviations of the best; 0 is off.",
        details="Keeps `l ≥ max l - n·σ`, σ being the standard deviation of the logits.",
    ),
    Parameter(
        name="xtc_probability", kind=Number(0, 1), group=DRAW, default=0.0, metavar="P", gguf_key="xtc_probability",
        stages=(StageSpec("xtc", shapes_draw=True),),
        help="How often the likeliest tokens are excluded (XTC); 0 is off.",
    ),
    Parameter(
        name="xtc_threshold", kind=Number(0, 1, above=True), group=DRAW, default=0.1, metavar="P",
        gguf_key="xtc_threshold",
        help="XTC removes all tokens at least this likely but the least likely of them.",
    ),
    # Penalties
    Parameter(
        # Below 0.001 a float32 logit could overflow, as with the temperature.
        name="repetition_penalty", kind=Number(1e-3, 100), group=PENALTIES, default=1.0, metavar="R",
        hf_key="repetition_penalty", gguf_key="penalty_repeat", stages=(StageSpec("repetition"),),
        help="Divides positive logits of tokens that occurred and multiplies negative ones; 1 is off.",
        details="`l / r` if l > 0, else `l · r`, where c > 0.",
    ),
    Parameter(
        name="frequency_penalty", kind=Number(-2, 2), group=PENALTIES, default=0.0, metavar="F",
        stages=(StageSpec("frequency"),),
        help="Subtracted from a token's logit for each time it occurred; 0 is off.", details="`l - c·f`.",
    ),
    Parameter(
        name="presence_penalty", kind=Number(-2, 2), group=PENALTIES, default=0.0, metavar="F",
        stages=(StageSpec("presence"),),
        help="Subtracted from a token's logit if it occurred; 0 is off.", details="`l - s` where c > 0.",
    ),
    Parameter(
        name="penalty_window", kind=Integer(1, also=-1), group=PENALTIES, derived="the preset's", metavar="N",
        gguf_key="penalty_last_n",
        help="How many tokens penalties look back on; -1 is all.",
    ),
    Parameter(
        name="penalty_scope", kind=Word(("all", "output", "mixed")), group=PENALTIES, derived="the preset's",
        metavar="SCOPE",
        help="What penalties count: all (prompt and output), output, or mixed (repetition counts both, the others the "
        "output).",
    ),
    Parameter(
        name="dry_multiplier", kind=Number(0, 100), group=PENALTIES, default=0.0, metavar="M",
        stages=(StageSpec("dry"),),
        help="Strength of the DRY penalty against repeating long sequences; 0 is off.",
        details="`l - m · dry_base^(length - dry_allowed_length)` for a token that would continue a repetition.",
    ),
    Parameter(
        name="dry_base", kind=Number(1, 100), group=PENALTIES, default=1.75, metavar="B",
        help="DRY's base: how fast its penalty grows with the length of the repetition.",
    ),
    Parameter(
        name="dry_allowed_length", kind=Integer(1), group=PENALTIES, default=2, metavar="N",
        help="DRY does not penalize repetitions shorter than this.",
    ),
    Parameter(
        name="dry_sequence_breakers", kind=Texts(), group=PENALTIES, default=("\n", ":", '"', "*"), metavar="TEXT",
        help="Strings at which DRY's repetitions end.",
    ),
    Parameter(
        name="dry_window", kind=Integer(1, also=-1), group=PENALTIES, default=-1, metavar="N",
        help="How many tokens DRY looks back on; -1 is all.",
    ),
    Parameter(
        name="no_repeat_ngram", kind=Integer(0), group=PENALTIES, default=0, metavar="N",
        hf_key="no_repeat_ngram_size", stages=(StageSpec("no_repeat_ngram"),),
        help="No sequence of this many tokens occurs twice; 0 is off.",
        details="Removes tokens that would complete an n-gram of the text so far.",
    ),
    # Which tokens
    Parameter(
        name="logit_bias", kind=Bias(), group=TOKENS, default={}, metavar="ID=X", hf_key="suppress_tokens",
        stages=(StageSpec("bias"),),
        help="Token ids and what is added to their logits.", details="`l + b`; minus infinity removes the token.",
    ),
    Parameter(
        name="allowed_token_ids", kind=TokenIds(least=1), group=TOKENS, metavar="ID,…", stages=(ALLOWED,),
        help="Only these tokens can be chosen.",
    ),
    Parameter(
        name="constraint", kind=Record(Constraint, Constraint.FIELDS, ("kind",)), group=TOKENS,
        stages=(StageSpec("constraint"),),
        help="What the answer must look like.",
        details="Removes what the schema, expression, choice or grammar does not allow next.",
    ),
    Parameter(
        name="thinking_budget", kind=Integer(0), group=LENGTH, metavar="N",
        help="Close the model's thinking after this many tokens; the answer follows.",
        details="The closing mark is written in place of the model's next token. In a chat the marks are the model's "
        "own; elsewhere `thinking_marks` gives them.",
    ),
    Parameter(
        name="thinking_marks", kind=Record(ThinkingMarks, ThinkingMarks.FIELDS, ("opens", "closes")), group=TOKENS,
        no_flag="a chat knows the model's own marks",
        help="The marks around thinking: a constraint holds for what follows it, thinking_budget for what is in it.",
    ),
    # How many, from which noise
    Parameter(
        name="seed", kind=Integer(0, MAX_SEED), group=COUNT, derived="drawn, and reported", metavar="SEED",
        help="The same seed gives the same answer; without one it is drawn and reported.",
    ),
    Parameter(
        name="n", kind=Integer(1, 1024), group=COUNT, default=1, is_set=True, metavar="N", is_interactive=False,
        flag="--answers", help="How many answers.",
    ),
    Parameter(
        name="best_of", kind=Integer(1, 1024), group=COUNT, derived="n", metavar="N",
        help="Draw this many answers and keep the n with the best mean logprob.",
    ),
    Parameter(
        name="beam", kind=Record(BeamParams, BeamParams.FIELDS, ("width",)), group=COUNT,
        help="Beam search with this many prefixes instead of a draw.",
    ),
    # What is reported
    Parameter(
        name="logprobs", kind=Integer(0), group=REPORT, metavar="K", is_interactive=False,
        help="Report each token's logprob and those of the k likeliest; 0 is the chosen token's alone.",
    ),
    Parameter(
        name="logprobs_stage", kind=Word(("raw", "final")), group=REPORT, default="raw", metavar="STAGE",
        is_interactive=False,
        help="Logprobs of the model's own distribution (raw), or after all sampling stages (final).",
    ),
    Parameter(
        name="prompt_logprobs", kind=Integer(0), group=REPORT, metavar="K", is_interactive=False,
        help="Report the same for the tokens of the prompt.",
    ),
    Parameter(
        name="trace", kind=Flag(), group=REPORT, default=False, is_set=True, no_flag="`unspool explain` sets it",
        help="Add to each token what every sampling stage did to it.",
    ),
    Parameter(
        name="trace_top", kind=Integer(1, 1000), group=REPORT, default=8, is_set=True,
        no_flag="`unspool explain` sets it",
        help="How many of the likeliest tokens a trace follows through the stages, and at least how many of the draw's "
        "best scores it reports (32 if more).",
    ),
    Parameter(
        name="trace_tokens", kind=TokenIds(), group=REPORT, default=(), no_flag="a command knows no token ids",
        help="Further tokens that a trace follows, however unlikely they are.",
    ),
    # How it is run
    Parameter(
        name="order", kind=Order(), group=DRAW, derived="unspool", metavar="ORDER",
        help="The order of sampling stages: the name of a preset (unspool, transformers, vllm, llama.cpp, mlx), or a "
        "list.",
    ),
    Parameter(
        name="priority", kind=Integer(-(2**31), 2**31 - 1), group=RUNNING, default=0, is_set=True,
        no_flag="a command runs one request", help="Requests with lower numbers run first.",
    ),
    Parameter(
        name="cache_salt", kind=Text(), group=RUNNING, no_flag="a command has one user",
        help="Cached prompts are shared only among requests with the same salt.",
    ),
    Parameter(
        name="speculate", kind=Text(), group=RUNNING, no_flag="the engine's --speculate holds for its one request",
        help="Which of the engine's drafters guesses ahead, or `off`; the answer is the same.",
    ),
)  # fmt: skip
NAMES = tuple(parameter.name for parameter in PARAMETERS)
BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
