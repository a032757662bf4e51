"""Names that point to the user's own code are covered by the two registries; here, what belongs to neither."""

import pickle

import pytest

from contraflow.errors import ConfigError
from contraflow.named import find


def test_a_table_entry_wins():
    assert find("a", {"a": 1}, what="thing") == 1


def test_an_empty_attribute_is_not_found(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="has no ''; it has nothing"):
        find(f"{tmp_path}/empty.py:", {}, what="thing")


def test_what_a_file_defines_can_be_pickled(tmp_path):
    (tmp_path / "pickled_thing.py").write_text("class Thing: pass")
    thing = find(f"{tmp_path}/pickled_thing.py:Thing", {}, what="thing")
    assert pickle.loads(pickle.dumps(thing)) is thing
