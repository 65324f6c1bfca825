"""What a caller sets instead of a model's own files: it takes effect, is reported, and nothing is taken that would do
nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unspool import LLM
from unspool.cli import main
from unspool.config import EngineConfig, RopeScaling
from unspool.errors import ModelError, RequestError, UnspoolError
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.models.overridden import overridden
from unspool.models.random import SHAPES, random_checkpoint, write_random_gguf

OPTIONS = {"device": "cpu", "threads": 1, "kv_tokens": 1024}
PROMPT = list(range(3, 200))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    write_random_gguf(path, replace(SHAPES["tiny"], context_length=512))
    return path


def answer(model: Path | Checkpoint, **options: Any) -> tuple[Any, str, tuple[str, ...]]:
    """The logprobs of a text, the fingerprint and the overrides of the receipt."""
    with LLM(model, **{**OPTIONS, **options}) as llm:
        scored = [None if token is None else token.logprob for token in llm.score(PROMPT)]
        receipt = llm.receipt(0)
        return scored, receipt.model, receipt.overrides


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rope_theta": 500.0}, "rope_theta=500"),
        ({"rope_scaling": "linear:2"}, "rope_scaling=linear 2"),
        ({"rope_scaling": "yarn:2:256"}, "rope_scaling=yarn 2, original_context 256"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 16}},
            "yarn 2, original_context 512, beta_fast 16",
        ),
        ({"override_kv": ["llama.rope.freq_base=float:500"]}, "override_kv=llama.rope.freq_base=float:500.0"),
        ({"override_kv": {"llama.rope.freq_base": 500}}, "override_kv=llama.rope.freq_base=float:500.0"),
    ],
)
def test_what_changes_bits_changes_the_fingerprint(path: Path, options: dict[str, Any], expected: str) -> None:
    bits, model, overrides = answer(path, **options)
    plain, own, nothing = answer(path)
    assert nothing == ()
    assert bits != plain
    assert model != own
    assert len(overrides) == 1
    assert overrides[0].endswith(expected)


def test_two_ways_to_the_same_numbers_have_the_same_bits(path: Path) -> None:
    config = replace(open_checkpoint(path).config, rope_theta=500.0)
    same = replace(open_checkpoint(path), config=config)
    expected = answer(same)
    assert answer(path, rope_theta=500.0)[:2] == expected[:2]
    assert answer(path, override_kv=["llama.rope.freq_base=float:500"])[0] == expected[0]
    yarn = RopeScaling("yarn", 2.0, original_context=512)
    scaled = replace(open_checkpoint(path), config=replace(open_checkpoint(path).config, rope_scaling=yarn))
    assert answer(path, rope_scaling="yarn:2")[0] == answer(scaled)[0]


def test_scaling_reaches_further_and_none_takes_it_away(path: Path) -> None:
    longer = overridden(open_checkpoint(path), EngineConfig(rope_scaling="yarn:4:256"))
    assert longer.config.context_length == 1024
    shape = SHAPES["llama-1b"]  # llama3's scaling by 32 from 8,192 tokens
    plain = overridden(replace(tiny(), config=replace(tiny().config, rope_scaling=shape.rope_scaling)),
                       EngineConfig(rope_scaling="none"))  # fmt: skip
    assert plain.config.rope_scaling is None
    assert plain.config.context_length == 8192
    assert [str(each) for each in plain.overrides] == ["rope_scaling=none"]
    assert plain.overrides[0].before == "llama3 32, original_context 8192"


def tiny() -> Checkpoint:
    return random_checkpoint(SHAPES["tiny"])


def test_a_maximum_changes_the_length_and_no_bit(path: Path) -> None:
    bits, model, overrides = answer(path, max_model_len=300)
    assert (bits, model) == answer(path)[:2]
    assert overrides == ("max_model_len=300",)
    with LLM(path, max_model_len=100, **OPTIONS) as llm:
        assert llm.engine.context_length == 100
        with pytest.raises(RequestError, match="maximum context length is 100 tokens"):
            llm.generate(PROMPT)
        assert len(llm.generate(PROMPT[:90], ignore_eos=True).token_ids) == 10
    with pytest.raises(
        RequestError, match=r"max_model_len is 513; m holds 512 tokens \(rope_scaling makes it hold more"
    ):
        answer(path, max_model_len=513)
    assert answer(path, rope_scaling="linear:2", max_model_len=513)[2][1] == "max_model_len=513"


def test_a_template_is_a_text_or_a_file(path: Path, tmp_path: Path) -> None:
    source = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    file = tmp_path / "own.jinja"
    file.write_text(source)
    for given in (source, str(file)):
        with LLM(path, chat_template=given, **OPTIONS) as llm:
            assert llm.decode(llm.render([{"role": "user", "content": "hello"}])) == "[hello]"
            assert llm.receipt(0).overrides[0].startswith("chat_template=sha256:")
            assert llm.receipt(0).model == answer(path)[1]
    (tmp_path / "notes.txt").write_text("no template")
    for wrong, why in (
        (str(tmp_path / "gone.jinja"), r"gone.jinja cannot be read: No such file"),
        (str(tmp_path), "cannot be read: Is a directory"),
        (str(tmp_path / "notes.txt"), "notes.txt holds no template: it has neither"),
    ):
        with pytest.raises(ModelError, match=f"chat_template: .*{why}"):
            answer(path, chat_template=wrong)
    with pytest.raises(UnspoolError, match="chat template"), LLM(path, chat_template="{% if %}", **OPTIONS) as llm:
        llm.render([{"role": "user", "content": "hello"}])


def test_keys_of_the_tokenizer(path: Path) -> None:
    with LLM(path, override_kv=["tokenizer.ggml.add_bos_token=bool:true"], **OPTIONS) as llm:
        assert llm.encode("a") == [256, ord("a")]
    ends = answer(path, override_kv=["tokenizer.ggml.eos_token_id=int:7"])
    assert ends[0] == answer(path)[0]
    assert ends[1] != answer(path)[1], "answers end elsewhere"
    same = answer(path, override_kv=["tokenizer.ggml.eos_token_id=int:256"])
    assert same[1:] == answer(path)[1:], "the file says so already"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "llama.rope.freq_bse=float:1e6",
            r"nothing reads the key 'llama.rope.freq_bse' .* mean 'llama.rope.freq_base'",
        ),
        (
            "tokenizer.ggml.add_bos_tokn=bool:true",
            "nothing reads the key .* did you mean 'tokenizer.ggml.add_bos_token'",
        ),
        ("general.nonsense=int:1", "nothing reads the key"),
        ("llama.block_count=str:two", "has llama.block_count as a int, not as str 'two'"),
        ("tokenizer.ggml.tokens=str:a", "has tokenizer.ggml.tokens as a list, not as str 'a'"),
        ("llama.block_count=int:1", "has no place in this architecture"),
        ("llama.rope.freq_base=float:0", "llama.rope.freq_base: 0.0 is outside"),
    ],
)
def test_keys_that_do_nothing_or_do_not_fit_are_refused(path: Path, text: str, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        answer(path, override_kv=[text])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"override_kv": ["llama"]}, r"override_kv is 'llama'; allowed: KEY=TYPE:VALUE"),
        ({"override_kv": ["a=int:x"]}, r"'x' is not a value of type int"),
        ({"override_kv": ["a=bool:1"]}, r"'1' is not a value of type bool"),
        ({"override_kv": ["a=float:inf"]}, "a finite number"),
        ({"override_kv": ["a=int:1", "a=int:2"]}, "override_kv sets a twice"),
        ({"override_kv": {"a": [1]}}, "override_kv: 'a' is"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; allowed: none, KIND:FACTOR"),
        ({"rope_scaling": "yarn:x"}, "rope_scaling is 'yarn:x'; allowed"),
        ({"rope_scaling": "ntk:2"}, "of the kind 'ntk'; allowed: linear, yarn, llama3, default"),
        ({"rope_scaling": "{"}, "rope_scaling is not JSON"),
        ({"rope_scaling": '{"rope_type": "yarn", "factr": 2}'}, "rope_scaling has 'factr'; known: rope_type"),
        ({"rope_scaling": 2}, "rope_scaling is 2; allowed"),
        ({"rope_theta": 0}, "rope_theta is 0; allowed: from 1"),
        ({"max_model_len": 0}, "max_model_len is 0; allowed: an integer from 2"),
        ({"chat_template": ""}, "chat_template is ''; allowed: a template"),
    ],
)
def test_wrong_values_are_refused_by_name(options: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why) as raised:
        EngineConfig(**options)
    assert raised.value.param == next(iter(options))


def test_what_would_change_no_layer_is_refused(path: Path) -> None:
    with pytest.raises(ModelError, match="rope_scaling: factor: it is missing"):
        answer(path, rope_scaling={"rope_type": "yarn"})
    learned = random_checkpoint(SHAPES["tiny-gpt2"])
    for options in ({"rope_theta": 5e5}, {"rope_scaling": "yarn:2"}):
        with pytest.raises(ModelError, match="no layer of gpt2 has rotary positions that it would change"):
            overridden(learned, EngineConfig(**options))
    with pytest.raises(ModelError, match="scales attention by its own RoPE scaling"):
        overridden(random_checkpoint(SHAPES["tiny-mistral3"]), EngineConfig(rope_scaling="yarn:2"))
    with pytest.raises(RequestError, match="override_kv sets keys of GGUF files"):
        overridden(tiny(), EngineConfig(override_kv=["llama.block_count=int:1"]))
    once = overridden(open_checkpoint(path), EngineConfig(rope_theta=500.0))
    assert overridden(once, EngineConfig(rope_theta=500.0)) is once
    with pytest.raises(RequestError, match="was opened with other overrides already"):
        overridden(once, EngineConfig(rope_theta=600.0))


def test_commands_tell_what_was_set(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}")
    options = ["--rope-theta", "500", "--max-model-len", "300", "--chat-template", str(template)]
    assert main(["plan", str(path), "--json", *options]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["context_length"] == 300
    assert [(each["option"], each["before"]) for each in reported["overrides"]] == [
        ("rope_theta", "10000"),
        ("max_model_len", "512"),
        ("chat_template", None),
    ]
    assert main(["plan", str(path), *options]) == 0
    assert "overrides     rope_theta 500 (in the model: 10000)\n" in capsys.readouterr().out
    main(["doctor", str(path), "--quick", *options])
    assert "rope_theta is set to 500" in capsys.readouterr().out
    assert main(["run", "Hi", "-m", str(path), "--device", "cpu", "-n", "2", "--json", *options]) == 0
    receipt = json.loads(capsys.readouterr().out)["receipt"]
    assert receipt["overrides"][:2] == ["rope_theta=500", "max_model_len=300"]
    (tmp_path / "plain.txt").write_text("no template")
    for wrong, why in (
        (["--chat-template", str(tmp_path / "gone")], "gone cannot be read: No such file or directory"),
        (["--chat-template", str(tmp_path / "plain.txt")], "plain.txt holds no template"),
        (["--override-kv", "a=b"], "override_kv is 'a=b'; allowed: KEY=TYPE:VALUE"),
        (["--max-model-len", "many"], "--max-model-len: 'many' is not a whole number"),
    ):
        assert main(["run", "Hi", "-m", str(path), *wrong]) != 0
        assert why in capsys.readouterr().err


def test_the_configuration_has_options_for_a_model(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from unspool.user_config import NamedModel, parse_config, read_config, with_model, without_model

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tmp_path / "unspool"
    directory.mkdir()
    file = directory / "config.toml"
    (directory / "own.jinja").write_text("<{{ messages[0].content }}>")
    text = (
        f'[models.tree]\nmodel = "{path}"\n\n[models.tree.options]\nmax_model_len = 300\nchat_template = "own.jinja"\n'
    )
    file.write_text(text + 'override_kv = {"llama.rope.freq_base" = 500}\n')
    with LLM("tree", **OPTIONS) as llm:
        assert llm.engine.context_length == 300
        assert llm.decode(llm.render([{"role": "user", "content": "hello"}])) == "<hello>"
        assert llm.receipt(0).overrides[0] == "override_kv=llama.rope.freq_base=float:500.0"
    with LLM("tree", max_model_len=200, **OPTIONS) as llm:
        assert llm.engine.context_length == 200, "what the caller says wins"
    assert main(["plan", "tree", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context_length"] == 300
    config = read_config()
    changed = with_model(config, file.read_text(), NamedModel("tree", "other.gguf"))
    assert parse_config(file, changed.encode()).models["tree"].options == config.models["tree"].options
    assert "options" not in without_model(config, file.read_text(), "tree")
    file.write_text(text.replace("max_model_len", "max_model_lenn"))
    with pytest.raises(
        ModelError, match=r"config.toml: models.tree.options: unknown option 'max_model_lenn'; did you me"
    ):
        LLM("tree")
    file.write_text(text.replace("300", "-1"))
    with pytest.raises(ModelError, match=r"config.toml: models.tree.options: max_model_len is -1"):
        LLM("tree")
    file.write_text(f'[models.tree]\nmodel = "{path}"\noptions = 3\n')
    with pytest.raises(ModelError, match=r"models.tree.options: a table was expected"):
        LLM("tree")
