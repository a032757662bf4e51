"""Names in a recipe become environments, or errors that help."""

import pytest

from contraflow.envs.arithmetic import Arithmetic
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError

MINE = """
from contraflow.envs.registry import make_env

def plain(options):
    return make_env("arithmetic", {"reversed": False, **options})

def broken(options):
    raise KeyError("no data")

def wrong(options):
    return "not an environment"
"""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_shipped_name_is_made():
    assert isinstance(make_env("arithmetic", {}), Arithmetic)


def test_an_unknown_name_gets_the_nearest_one_and_the_way_to_your_own():
    with pytest.raises(
        ConfigError, match=r"unknown env\.name 'arithmatic'; did you mean 'arithmetic'\?.*file\.py:NAME"
    ):
        make_env("arithmatic", {})


def test_a_file_and_a_module_can_be_named(mine, monkeypatch):
    from_file = make_env(f"{mine}:plain", {})
    monkeypatch.syspath_prepend(mine.parent)
    from_module = make_env("mine:plain", {})
    assert from_file.task("train", 5) == from_module.task("train", 5)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("plane", "has no 'plane'; it has make_env, plain, broken, wrong"),
        ("broken", "could not be made: KeyError: 'no data'"),
        ("wrong", "gave a str without name, bounded, task, open"),
    ],
)
def test_a_maker_that_fails_is_named(mine, attribute, message):
    with pytest.raises(ConfigError) as refusal:
        make_env(f"{mine}:{attribute}", {})
    assert message in str(refusal.value)


def test_a_module_that_does_not_load_says_why(tmp_path):
    (tmp_path / "torn.py").write_text("import nothing_of_that_name")
    for place in (f"{tmp_path}/torn.py", f"{tmp_path}/missing.py", "no_such_package.module"):
        with pytest.raises(ConfigError, match="does not load"):
            make_env(f"{place}:make", {})


def test_a_refusal_of_the_makers_own_keeps_its_words(mine):
    with pytest.raises(ConfigError, match=r"unknown key 'env\.options\.sed'"):
        make_env(f"{mine}:plain", {"sed": 1})
