"""Integer expressions with + - *, worked out by a parser of our own: what a model writes is never run as code.

    expression = number { ("+" | "-" | "*") number }      number = ["-"] digit { digit }      * binds tighter

Bounded: at most `MAX_CHARS` characters, so the value has about as many digits at most.
"""

import re

MAX_CHARS = 64
_WHOLE = re.compile(r"-?[0-9]+(?:[-+*]-?[0-9]+)*")
_OPERAND = re.compile(r"([-+*]?)(-?[0-9]+)")  # a leading minus reads as an operator: the value is the same


def evaluate(text: str, *, max_operands: int) -> int:
    """The value of `text`.

    Raises: ValueError saying what is wrong, when it is too long, malformed or has more operands than allowed.

    >>> evaluate("2+3*-4", max_operands=3)
    -10
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"an expression of {len(text)} characters; at most {MAX_CHARS} are allowed")
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is not numbers joined by + - *")
    operands = _OPERAND.findall(text)
    if len(operands) > max_operands:
        raise ValueError(f"{len(operands)} operands; at most {max_operands} are allowed")
    total = product = 0
    for operator, number in operands:
        if operator == "*":
            product *= int(number)
        else:
            total += product
            product = -int(number) if operator == "-" else int(number)
    return total + product
