"""Doctor finds every planted fault, and nothing in a healthy model."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.fixtures.small_vocabulary import SmallVocabulary
from tests.unit.schemas import validate
from unspool.chat.answers import ToolCall
from unspool.cli import faults, main
from unspool.config import RopeScaling
from unspool.doctor import Finding, Subject, examine, open_subject, serious_findings
from unspool.doctor.settings import check_context
from unspool.doctor.tensors import check_tensors, rounding_noise
from unspool.doctor.tokens import check_duplicates, check_sizes
from unspool.doctor.trial import judge, judge_calls
from unspool.errors import ModelError
from unspool.events import Timings, Usage
from unspool.models.random import SHAPES, byte_vocabulary, random_checkpoint
from unspool.models.registry import metadata_of
from unspool.results import Completion
from unspool.weights.formats import FORMATS
from unspool.weights.gguf_writer import write_gguf
from unspool.weights.weight import Weight, encode_weight

END, TURN = 256, 257
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def write_model(
    path: Path, *, template: str | None = TEMPLATE, weights: Mapping[str, Weight] | None = None, **keys: Any
) -> Path:
    """A tiny chat model; `keys` replace metadata, with __ for dots; None removes a key."""
    config = SHAPES["tiny"]
    metadata = metadata_of(config) | byte_vocabulary(config.vocab_size)
    metadata["tokenizer.ggml.tokens"][TURN] = "<|turn|>"
    metadata["tokenizer.ggml.token_type"][TURN] = 3
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    for key, value in keys.items():
        metadata[key.replace("__", ".")] = value
    metadata = {key: value for key, value in metadata.items() if value is not None}
    write_gguf(path, metadata, dict(random_checkpoint(config).weights) | dict(weights or {}))
    return path


def write_endless(path: Path) -> Path:
    """No key names an end token, and no token has a name that is known for one."""
    tokens = byte_vocabulary(SHAPES["tiny"].vocab_size)["tokenizer.ggml.tokens"]
    tokens[END], tokens[TURN] = "<|mark|>", "<|turn|>"
    return write_model(path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__eos_token_id=None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def found(subject: Subject) -> dict[str, Finding]:
    return {finding.code: finding for finding in examine(subject)}


def test_a_healthy_model_has_no_findings(model: Path) -> None:
    assert found(open_subject(write_model(model))) == {}


@pytest.mark.slow
def test_the_default_model_has_nothing_serious(smollm2_path: Path) -> None:
    codes = {finding.code: finding.severity for finding in examine(open_subject(smollm2_path))}
    assert codes == {"end-is-padding": "note", "template-drops-tools": "note"}


# End tokens and template --------------------------------------------------------------------------------------------
def test_a_missing_end_token(model: Path) -> None:
    subject = open_subject(write_endless(model))
    assert found(subject)["end-token-missing"].severity == "error"


def test_an_end_of_turn_that_is_no_end_token(model: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>\n{% endfor %}{{ tools }}"
    finding = found(open_subject(write_model(model, template=template)))["end-of-turn-not-an-end"]
    assert finding.severity == "error"
    assert "<|turn|>" in finding.title
    assert "257" in finding.fix


def test_padding_that_is_the_end(model: Path) -> None:
    assert "end-is-padding" in found(open_subject(write_model(model, tokenizer__ggml__padding_token_id=END)))


def test_a_start_token_written_twice(model: Path) -> None:
    template = "<|endoftext|><|endoftext|>" + TEMPLATE
    assert found(open_subject(write_model(model, template=template)))["start-doubled"].severity == "warning"


def test_a_start_token_in_template_and_tokenizer(model: Path) -> None:
    template = "<|endoftext|>" + TEMPLATE
    subject = open_subject(write_model(model, template=template, tokenizer__ggml__add_bos_token=True))
    assert found(subject)["start-in-template-and-tokenizer"].severity == "note"


def test_a_template_of_another_vocabulary(model: Path) -> None:
    finding = found(open_subject(write_model(model, template="<start_of_turn>" + TEMPLATE)))
    assert "'<start_of_turn>'" in finding["template-not-in-vocabulary"].title


def test_a_template_that_drops_tools(model: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    assert found(open_subject(write_model(model, template=template)))["template-drops-tools"].severity == "note"


def test_a_template_that_fails(model: Path) -> None:
    subject = open_subject(write_model(model, template="{{ raise_exception('no') }}"))
    assert found(subject)["template-fails"].severity == "error"
    assert [finding.code for finding in serious_findings(subject)] == ["template-fails"]


# Settings -----------------------------------------------------------------------------------------------------------
def beside(model: Path, **settings: Any) -> None:
    model.with_suffix(".generation_config.json").write_text(json.dumps(settings))


def test_surprising_generation_settings(model: Path) -> None:
    write_model(model)
    beside(model, top_k=1, max_length=20, epsilon_cutoff=0.1, temperature=2.0)
    codes = found(open_subject(model))
    assert {"top-k-is-one", "length-limit-low", "settings-not-used", "temperature-high"} <= set(codes)
    assert "epsilon_cutoff" in codes["settings-not-used"].title


def test_settings_that_are_off_are_no_findings(model: Path) -> None:
    write_model(model)
    beside(model, top_k=40, num_beams=1, epsilon_cutoff=0.0, suppress_tokens=None, max_length=4096)
    assert found(open_subject(model)) == {}


def test_a_context_beyond_rope_scaling(model: Path) -> None:
    subject = open_subject(write_model(model))
    scaling = RopeScaling("yarn", 2.0, original_context=128)
    config = replace(subject.checkpoint.config, rope_scaling=scaling, context_length=512)
    subject = replace(subject, checkpoint=replace(subject.checkpoint, config=config))
    (finding,) = check_context(subject)
    assert (finding.code, "256" in finding.title) == ("context-beyond-scaling", True)


# Vocabulary ---------------------------------------------------------------------------------------------------------
def test_doubled_tokens(model: Path) -> None:
    vocabulary: Any = SmallVocabulary(doubled=True)
    (finding,) = check_duplicates(replace(open_subject(write_model(model)), tokenizer=vocabulary))
    assert finding.code == "tokens-doubled"
    assert "'name'" in finding.title


def test_tokens_that_were_never_trained(model: Path) -> None:
    table = random_checkpoint(SHAPES["tiny"]).weights["token_embd.weight"].dequantize().copy()
    table[70:73] = 0
    subject = open_subject(write_model(model, weights={"token_embd.weight": encode_weight("token_embd.weight", table)}))
    assert found(subject)["tokens-untrained"].title.startswith("3 tokens")


def test_a_tokenizer_larger_than_the_embedding(model: Path) -> None:
    subject = open_subject(write_model(model))
    config = replace(subject.checkpoint.config, vocab_size=300)
    subject = replace(subject, checkpoint=replace(subject.checkpoint, config=config))
    assert found(subject)["more-tokens-than-rows"].severity == "error"


def test_an_embedding_larger_than_the_tokenizer(model: Path) -> None:
    subject = open_subject(write_model(model))
    config = replace(subject.checkpoint.config, vocab_size=subject.tokenizer.vocab_size + 20)
    (finding,) = check_sizes(replace(subject, checkpoint=replace(subject.checkpoint, config=config)))
    assert (finding.code, finding.severity) == ("more-rows-than-tokens", "note")


# Weights ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("value", "code"), [(np.nan, "weights-not-finite"), (np.inf, "weights-not-finite")])
def test_values_that_are_no_numbers(model: Path, value: float, code: str) -> None:
    name = "blk.1.ffn_down.weight"
    values = random_checkpoint(SHAPES["tiny"]).weights[name].dequantize().copy()
    values[5, 7] = value
    subject = open_subject(write_model(model, weights={name: encode_weight(name, values)}))
    finding = found(subject)[code]
    assert finding.severity == "error"
    assert name in finding.title


def test_a_tensor_of_zeros(model: Path) -> None:
    name = "blk.0.attn_v.weight"
    shape = random_checkpoint(SHAPES["tiny"]).weights[name].shape
    subject = open_subject(write_model(model, weights={name: encode_weight(name, np.zeros(shape, np.float32))}))
    assert name in found(subject)["weights-all-zero"].title


def test_an_important_tensor_rounded_too_coarsely(model: Path) -> None:
    """Outliers in each block stretch its scale: what is left of the other weights is little."""
    name = "blk.0.attn_v.weight"
    values = random_checkpoint(SHAPES["tiny"]).weights[name].dequantize().copy()
    values[:, ::32] *= 12
    raw = memoryview(FORMATS["q4_0"].encode(values))
    coarse = Weight(name, "q4_0", values.shape, raw)
    true_noise = np.sqrt(np.mean((coarse.dequantize() - values) ** 2) / np.mean(values**2))
    subject = open_subject(write_model(model, weights={name: coarse}))
    assert "quantization-coarse" in found(subject), true_noise


@pytest.mark.parametrize("format", ["q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q6_k"])
def test_the_estimate_of_rounding_is_near_the_real_error(format: str) -> None:
    values = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)
    decoded = FORMATS[format].decode(np.frombuffer(FORMATS[format].encode(values), np.uint8)).reshape(values.shape)
    real = float(np.sqrt(np.mean((decoded - values) ** 2) / np.mean(values**2)))
    assert 0.7 * real < rounding_noise(decoded) < 1.7 * real


def test_progress_covers_every_byte(model: Path) -> None:
    subject = open_subject(write_model(model))
    calls: list[tuple[int, int]] = []
    assert list(check_tensors(subject, lambda done, total: calls.append((done, total)))) == []
    assert calls[-1][0] == calls[-1][1] == sum(weight.nbytes for weight in subject.checkpoint.weights.values())


# Trial and command --------------------------------------------------------------------------------------------------
def completion(reason: Any) -> Completion:
    return Completion("", (), reason, Usage(3, 4), Timings(0, 0, 0, 0, None, None))


def test_judging_a_trial() -> None:
    assert list(judge([completion("eos")] * 6)) == []
    assert [f.code for f in judge([completion("length")] * 5 + [completion("eos")])] == ["trial-does-not-stop"]
    assert [f.code for f in judge([completion("length")] + [completion("eos")] * 5)] == ["trial-long-answers"]
    (finding,) = judge([completion("repetition")] * 4 + [completion("eos")] * 2)
    assert (finding.code, finding.severity) == ("trial-repeats", "error")
    assert [f.severity for f in judge([completion("repetition")] * 2 + [completion("eos")] * 4)] == ["warning"]


def answer(text: str, *calls: ToolCall, reason: Any = "eos") -> Any:
    """As much of a Result as is looked at."""
    return SimpleNamespace(text=text, tool_calls=calls, finish_reason=reason)


CALL = ToolCall("1", "get_weather", '{"city": "Oslo"}')


def test_judging_calls_of_tools() -> None:
    good = answer("", CALL)
    assert list(judge_calls([good, good], good, shows_tools=True)) == []
    text = answer('{"name": "get_weather", "arguments": {"city": "Oslo"}}')
    (finding,) = judge_calls([good, text], good, shows_tools=True)
    assert (finding.code, finding.severity) == ("trial-no-tool-call", "warning")
    assert finding.title.startswith("1 of 2 answers to a request for a tool")
    assert "get_weather" in finding.title
    (finding,) = judge_calls([text], good, shows_tools=False)
    assert finding.severity == "note"
    broken = [ToolCall("1", "get_weather", '{"city": "Os'), ToolCall("1", "get_weather", '{"city": 3}'),
              ToolCall("1", "other", "{}")]  # fmt: skip
    for bound in (answer("", call) for call in broken):
        (finding,) = judge_calls([], bound, shows_tools=True)
        assert (finding.code, finding.severity) == ("trial-call-broken", "error")
    (finding,) = judge_calls([], answer('{"na', reason="length"), shows_tools=True)
    assert (finding.code, finding.severity) == ("trial-call-broken", "warning")


def test_the_command_reports_json_and_fails_on_errors(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_endless(model)
    assert main(["doctor", str(model), "--json"]) == 1
    reported = validate("doctor", json.loads(capsys.readouterr().out))
    assert reported["counts"]["error"] == 1


# At every load ------------------------------------------------------------------------------------------------------
RUN = ["run", "--raw", "hi", "-n", "1", "--temperature", "0", "--threads", "1", "-q"]


def test_loading_tells_serious_findings_in_one_line(
    model: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_endless(model)
    for _ in range(2):  # found, and remembered
        assert main([*RUN, "-m", str(model)]) == 0
        assert capsys.readouterr().err == (
            f"unspool: warning: no end token: the model's files name none; `unspool doctor {model}` says what to do\n"
        )
    write_model(model)  # mended
    assert main([*RUN, "-m", str(model)]) == 0
    assert capsys.readouterr().err == ""


def test_a_remembered_model_is_not_examined_again(
    model: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Starting must not get slower: the second time nothing of the doctor is run."""
    write_model(model)
    assert main([*RUN, "-m", str(model)]) == 0
    monkeypatch.setattr(faults, "_find", lambda llm: pytest.fail("examined again"))
    assert main([*RUN, "-m", str(model)]) == 0
    (own_cache / "findings.json").write_text("[1]")  # no file of ours: as if there were none
    monkeypatch.setattr(faults, "_find", lambda llm: ["a fault", "another"])
    assert main([*RUN, "-m", str(model)]) == 0
    assert "a fault (and 1 more); `unspool doctor" in capsys.readouterr().err


def test_settings_beside_a_model_are_looked_at_again(
    model: Path, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_endless(model)
    assert main([*RUN, "-m", str(model)]) == 0
    assert "no end token" in capsys.readouterr().err
    beside(model, eos_token_id=END)
    assert main([*RUN, "-m", str(model)]) == 0
    kept = json.loads((own_cache / "findings.json").read_text())
    assert len(kept) == 2


def test_only_so_many_models_are_remembered(model: Path, own_cache: Path) -> None:
    own_cache.mkdir(parents=True)
    (own_cache / "findings.json").write_text(json.dumps({str(n): [] for n in range(100)}))
    write_model(model)
    assert main([*RUN, "-m", str(model)]) == 0
    assert len(json.loads((own_cache / "findings.json").read_text())) == faults.MOST_KEPT


def test_the_command_tries_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random weights repeat themselves: the trial says so."""
    assert main(["doctor", str(write_model(model)), "--try", "--quick"]) == 1
    output = capsys.readouterr().out
    assert re.search("[456] of 6 answers repeat a passage", output)
    assert "2 of 2 answers to a request for a tool have no call" in output


def test_a_base_model_has_no_chat_to_try(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(write_model(model, template=None)), "--try", "--quick", "--json"]) == 0
    reported = validate("doctor", json.loads(capsys.readouterr().out))
    assert "trial-needs-template" in [finding["code"] for finding in reported["findings"]]


def test_an_option_in_place_of_a_value_of_the_files(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", str(write_model(model)), "--quick", "--json", "--rope-theta", "5000"]
    assert main(arguments) == 0
    (finding,) = validate("doctor", json.loads(capsys.readouterr().out))["findings"]
    assert (finding["code"], finding["severity"]) == ("overridden", "note")
    assert "5000" in finding["title"]


def test_a_file_that_cannot_be_opened_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\0")
    with pytest.raises(ModelError):
        open_subject(tmp_path / "broken.gguf")


# Documentation ------------------------------------------------------------------------------------------------------
def codes_in_source() -> set[str]:
    """The first argument of every Finding that doctor makes."""
    import unspool.doctor

    calls = (
        node
        for path in Path(unspool.doctor.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding"
    )
    return {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}


def test_the_documents_table_has_every_finding() -> None:
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE)) == codes_in_source()


def test_every_finding_is_planted_in_a_test() -> None:
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert {code for code in codes_in_source() if tests.count(f'"{code}"') == 0} == set()
