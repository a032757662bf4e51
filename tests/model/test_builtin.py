"""Names of model folders."""

import pytest

from contraflow.errors import ConfigError, ModelError
from contraflow.model.builtin import model_folder, shipped_models


@pytest.fixture
def shipped(tmp_path):
    for name in ("tiny", "small"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def test_shipped_models_are_found_by_name(shipped):
    assert shipped_models(shipped) == ["builtin:small", "builtin:tiny"]
    assert model_folder("builtin:tiny", shipped=shipped) == shipped / "tiny"


def test_a_path_is_taken_as_it_is(shipped):
    assert model_folder(str(shipped / "tiny")) == shipped / "tiny"


@pytest.mark.parametrize("name", ["builtin:tinny", "no/such/folder", "tiny"])
def test_a_missing_model_lists_what_is_shipped(shipped, name):
    with pytest.raises(ConfigError, match=r"no such model; shipped: builtin:small, builtin:tiny; or give the path"):
        model_folder(name, shipped=shipped)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        model_folder(str(tmp_path))
