"""Generation settings and context: values that change every answer without anyone having asked for it."""

from __future__ import annotations

from collections.abc import Iterator

from unspool.doctor.finding import Finding
from unspool.doctor.subject import Subject

LOW_LENGTH = 256  # tokens: a limit below this cuts ordinary answers


def check_generation(subject: Subject) -> Iterator[Finding]:
    generation = subject.generation
    if generation.get("top_k") == 1 and generation.get("do_sample", True) is not False:
        yield Finding(
            "top-k-is-one", "warning", "certain", "the generation settings set top_k to 1",
            "every answer is greedy, whatever the temperature; regenerating gives the same text",
            "set top_k in the request (0 turns it off), or remove it from generation_config.json",
        )  # fmt: skip
    for name in ("max_length", "max_new_tokens"):
        value = generation.get(name)
        if isinstance(value, int) and 0 < value < LOW_LENGTH:
            yield Finding(
                "length-limit-low", "note", "certain", f"the generation settings limit answers: {name} is {value}",
                "nothing here: unspool does not take length limits from a model; other engines cut answers",
                f"remove {name} from generation_config.json",
            )  # fmt: skip
    for note in subject.checkpoint.notes:
        yield Finding(
            "settings-not-used", "warning", "certain", note, "answers may differ from those of programs that honour it",
            "ask for something like it in the request: logit_bias, bad_words, min_tokens, stop, beam",
        )  # fmt: skip
    temperature = generation.get("temperature", generation.get("temp"))
    if isinstance(temperature, int | float) and temperature > 1.5:
        yield Finding(
            "temperature-high", "warning", "likely", f"the generation settings set the temperature to {temperature:g}",
            "answers ramble or lose their thread", "set temperature in the request",
        )  # fmt: skip


def check_context(subject: Subject) -> Iterator[Finding]:
    """A context that rotary positions were not made for."""
    config = subject.checkpoint.config
    scaling = config.rope_scaling
    if scaling is None or not scaling.original_context:
        return
    reach = int(scaling.original_context * scaling.factor)
    if config.context_length > 1.05 * reach:
        yield Finding(
            "context-beyond-scaling", "warning", "likely",
            f"the context is {config.context_length:,} tokens; RoPE scaling ({scaling.kind}, {scaling.factor:g} times "
            f"{scaling.original_context:,}) reaches {reach:,}",
            f"answers fall apart beyond some {reach:,} tokens",
            f"keep prompts and answers within {reach:,} tokens, or set the scaling that the model was trained with",
        )  # fmt: skip


def check_overrides(subject: Subject) -> Iterator[Finding]:
    for each in subject.checkpoint.overrides:
        yield Finding(
            "overridden", "note", "certain", f"{each.option} is set to {each.value}",
            f"answers are those of that value; the model's own is {each.before or 'not set'}",
            "leave the option away for the model's own value",
        )  # fmt: skip


CHECKS = (check_generation, check_context, check_overrides)
