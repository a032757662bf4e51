"""Objects as YAML text, the same bytes every time: the only file that knows the YAML library."""

from collections.abc import Sequence
from typing import Any

from contraflow.errors import ConfigError

try:
    import yaml
except ImportError:
    raise ConfigError("objects are written by PyYAML, which is not installed: pip install 'contraflow[eks]'") from None

Object = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """No anchors, lists indented under their key, texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def write_objects(objects: Sequence[Object], *, about: str = "") -> str:
    """Several objects as one text with `---` between them, keys in the order given; `about` is its comment."""
    comment = "".join(f"# {line}\n" for line in about.splitlines())
    return comment + "---\n".join(
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True) for one in objects
    )
