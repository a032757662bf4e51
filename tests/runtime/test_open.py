"""The recipe's section decides the runtime."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest

from contraflow import config
from contraflow.errors import ConfigError
from contraflow.runtime import open_runtime
from contraflow.runtime.inline import InlineRuntime
from contraflow.runtime.local import LocalRuntime


def test_each_kind_opens_its_runtime(tmp_path: Path) -> None:
    async def scene() -> None:
        for kind, made in (("inline", InlineRuntime), ("local", LocalRuntime)):
            runtime = open_runtime(config.check_recipe({"runtime": {"kind": kind}}).runtime, tmp_path)
            assert isinstance(runtime, made)
            await runtime.close()

    asyncio.run(scene())


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    section = config.Runtime.model_construct(kind="moon", threads=1)
    with pytest.raises(ConfigError, match=r"runtime\.kind = 'moon': allowed are 'local', 'inline' and 'ray'"):
        open_runtime(section, tmp_path)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_ray_where_it_is_not_installed_is_refused_with_what_to_install(tmp_path: Path) -> None:
    section = config.check_recipe({"runtime": {"kind": "ray"}}).runtime
    with pytest.raises(ConfigError, match=r"Ray is not installed here; pip install 'contraflow\[ray\]'"):
        open_runtime(section, tmp_path)
