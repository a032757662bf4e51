"""Names that point to the user's own code are covered by the two registries; here, what belongs to neither."""

import pytest

from contraflow.errors import ConfigError
from contraflow.named import find


def test_a_table_entry_wins():
    assert find("a", {"a": 1}, what="thing") == 1


def test_an_empty_attribute_is_not_found(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="has no ''; it has nothing"):
        find(f"{tmp_path}/empty.py:", {}, what="thing")


def test_a_file_is_loaded_once_and_files_of_the_same_name_are_two(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"name, thing = {folder!r}, object()")
    assert [find(f"{tmp_path}/{folder}/same.py:name", {}, what="thing") for folder in ("a", "b")] == ["a", "b"]
    once, again = (find(f"{tmp_path}/a/same.py:thing", {}, what="thing") for _ in range(2))
    assert once is again


def test_a_file_that_failed_can_be_mended_and_loaded(tmp_path):
    (tmp_path / "torn.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        find(f"{tmp_path}/torn.py:thing", {}, what="thing")
    (tmp_path / "torn.py").write_text("thing = 5  # mended")
    assert find(f"{tmp_path}/torn.py:thing", {}, what="thing") == 5
