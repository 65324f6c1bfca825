"""The configuration file: names, aliases, the default; bad files are refused by key, and changes keep comments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unspool.cli import main
from unspool.errors import ModelError
from unspool.user_config import config_path, read_config
from unspool.weights.store import resolve

TEXT = """\
# my models
default = "coder"

[models.coder]  # the small one
model = "MODEL"
aliases = ["code", "gpt-4o-mini"]

[models."v1.5"]
model = "org/name"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "unspool").mkdir()
    return tmp_path


def write(home: Path, text: str = TEXT) -> Path:
    path = home / "unspool" / "config.toml"
    path.write_text(text.replace("MODEL", str(home / "model.gguf")), "utf-8")
    return path


def test_without_a_file_there_are_no_names(home: Path) -> None:
    config = read_config()
    assert (config.path, config.default, config.names) == (home / "unspool/config.toml", "smollm2", [])


def test_names_and_aliases_stand_for_a_model(home: Path) -> None:
    write(home)
    (home / "model.gguf").write_bytes(b"")
    assert read_config().default == "coder"
    assert read_config().names == ["coder", "code", "gpt-4o-mini", "v1.5"]
    for name in ("coder", "gpt-4o-mini"):
        assert resolve(name) == home / "model.gguf"
    with pytest.raises(ModelError, match="did you mean 'coder"):
        resolve("codr")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("default = 3", "default: the name of a model was expected"),
        ("defalt = 'x'", "defalt: this key is not known; did you mean 'default'"),
        ("models = 1", "models: tables were expected"),
        ("[models.a]\naliases = ['b']", "models.a.model: a file"),
        ("[models.a]\nmodel = 'x'\naliases = 'b'", "models.a.aliases: a list"),
        ("[models.a]\nmodel = 'x'\npath = 'b'", "models.a.path: this key is not known"),
        ("[models.a]\nmodel = 'x'\naliases = ['a b']", "'a b' is no name"),
        ("[models.a]\nmodel = 'x'\n[models.b]\nmodel = 'y'\naliases = ['a']", "'a' is a name of models.a already"),
        ("[models", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(home: Path, text: str, expected: str) -> None:
    path = write(home, text)
    with pytest.raises(ModelError) as refused:
        read_config()
    assert str(refused.value).startswith(str(path))
    assert expected in str(refused.value)


def test_the_command_shows_and_changes_and_keeps_comments(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(home)
    assert main(["config", "add", "two", "org/other", "--alias", "zwei"]) == 0
    assert main(["config", "add", "coder", "org/new"]) == 0  # under a name that is taken: replaced
    assert main(["config", "default", "two"]) == 0
    assert main(["config", "remove", "v1.5"]) == 0
    assert path.read_text("utf-8").startswith('default = "two"\n# my models\n')
    capsys.readouterr()
    assert main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": str(path),
        "default": "two",
        "models": {
            "two": {"model": "org/other", "aliases": ["zwei"]},
            "coder": {"model": "org/new", "aliases": []},
        },
    }
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == f"{config_path()}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["bogus"], "'bogus' is no action"),
        (["add", "x"], "takes NAME MODEL"),
        (["remove", "x"], "no model 'x'"),
        (["add", "a b", "org/x"], "'a b' is no name"),
        (["add", "other", "org/x", "--alias", "coder"], "already"),
        (["default", "x", "--alias", "y"], "--alias goes with config add"),
    ],
)
def test_a_wrong_change_leaves_the_file(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    path = write(home)
    before = path.read_bytes()
    assert main(["config", *arguments]) == 2
    assert expected in capsys.readouterr().err
    assert path.read_bytes() == before


def test_commands_take_the_default_of_the_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(home)
    assert main(["plan"]) == 2
    assert f"{home / 'model.gguf'} does not exist" in capsys.readouterr().err
