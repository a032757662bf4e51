"""Python values as flat lists of tokens: equal values have equal tokens, and nobody has to trust who wrote them.

Takes values made of None, numbers, text, bytes, lists, tuples, sets and dicts; gives tokens. As in Python, 1, 1.0 and
True are equal and so are a set and a frozenset; a list and a tuple are not.
"""

import math
from collections.abc import Iterable

NUMBER = "n"  # begins a number's token; the rest is hexadecimal, or nan, inf, -inf


def tokens_of(value: object) -> list[str]:
    """The tokens of a value. Exact types only: what a subclass says of itself is not believed.

    Raises: TypeError for any other type, RecursionError for nesting beyond the interpreter's limit.
    """
    kind = type(value)
    if kind is float or kind is int or kind is bool:
        return [NUMBER + _number(value)]  # type: ignore[arg-type]
    if value is None:
        return ["none"]
    if kind is str:
        return ["s" + value]  # type: ignore[operator]
    if kind is bytes:
        return ["b" + value.hex()]  # type: ignore[attr-defined]
    if kind is list or kind is tuple:
        return _framed("[" if kind is list else "(", map(tokens_of, value))  # type: ignore[call-overload]
    if kind is set or kind is frozenset:
        return _framed("{", sorted(map(tokens_of, value)))  # type: ignore[call-overload]
    if kind is dict:
        return _framed(":", sorted(tokens_of(key) + tokens_of(item) for key, item in value.items()))  # type: ignore[attr-defined]
    raise TypeError(
        f"a {kind.__name__} is none of the types that can be compared: None, bool, int, float, str, bytes, "
        "list, tuple, set, frozenset, dict"
    )


def number_of(token: str) -> float:
    """The number a token stands for. Raises: ValueError when it stands for none, OverflowError when it is too large."""
    if not token.startswith(NUMBER):
        raise ValueError(f"{token[:20]!r} is no number")
    text = token[len(NUMBER) :]
    return float.fromhex(text) if "p" in text or "n" in text else float(int(text, 16))


def _number(value: float) -> str:
    if isinstance(value, float) and (not math.isfinite(value) or not value.is_integer()):
        return value.hex()
    return format(int(value), "x")


def _framed(sign: str, parts: Iterable[list[str]]) -> list[str]:
    return [sign, *(token for part in parts for token in part), "end"]
