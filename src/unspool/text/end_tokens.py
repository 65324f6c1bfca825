"""Which of a vocabulary's control tokens end an answer, by their text."""

from __future__ import annotations

from collections.abc import Mapping

# Tokens that end a turn, a message or a text, whatever a file's eos_token_id says: files often name only one.
# fmt: off
END_TOKENS = frozenset(
    {"</s>", "<EOT>", "<end_of_turn>", "<end_of_utterance>", "<eos>", "<turn|>", "<|END_OF_TURN_TOKEN|>",
     "<|calls|>", "<|call|>", "<|end_of_text|>", "<|end_of_turn|>", "<|endoftext|>", "<|endofturn|>", "<|end|>",
     "<|eom_id|>", "<|eom|>", "<|eos|>", "<|eot_id|>", "<|eot|>", "<|flush|>", "<|im_end|>", "<|return|>",
     "<|tool_response>", "<｜end▁of▁sentence｜>", "[EOS]", "[EOT]", "[e~[", "_<EOT>"}
)
# fmt: on


def end_ids(ids: Mapping[str, int], marks: frozenset[int]) -> set[int]:
    """The end tokens among a vocabulary's marks, by their text."""
    found = {name: ids[name] for name in END_TOKENS if ids.get(name) in marks}
    if "<|end|>" in found and found.keys() & {"<|call|>", "<|calls|>"} and found.keys() & {"<|return|>", "<|flush|>"}:
        del found["<|end|>"]  # in these formats it ends one of an answer's messages, not the answer
    return set(found.values())
