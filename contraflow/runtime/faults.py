"""Errors that travel: a worker's exception becomes a `Fault`, and an exception again where the call was made.

Every class of errors.py keeps its type, text and plain attributes; a subclass of one arrives as the nearest class that
errors.py has; any other exception arrives as `RemoteError`. The worker's traceback travels along as a note.
"""

import traceback

import msgspec

from contraflow import errors
from contraflow.errors import ContraflowError, RemoteError

Plain = str | int | float | bool | None


class Fault(msgspec.Struct, frozen=True):
    """An exception on the wire. `kind` is a class of errors.py, or empty for a foreign exception."""

    worker: str
    method: str
    kind: str
    type: str
    text: str
    traceback: str
    attributes: dict[str, Plain]


def to_fault(error: BaseException, *, worker: str, method: str) -> Fault:
    """Describe what `method` of `worker` raised."""
    kind = _kind(error)
    attributes = {name: _sound(value) for name, value in vars(error).items() if isinstance(value, Plain)}
    return Fault(
        worker=worker,
        method=method,
        kind=kind,
        type=type(error).__qualname__,
        text=str(_sound(str(error))),
        traceback=str(_sound("".join(traceback.format_exception(error)))),
        attributes=attributes if kind else {},
    )


def from_fault(fault: Fault) -> ContraflowError:
    """The exception to raise at the caller."""
    kind = getattr(errors, fault.kind, None) if fault.kind else None
    if not (isinstance(kind, type) and issubclass(kind, ContraflowError)):
        return RemoteError(fault.worker, fault.method, type=fault.type, text=fault.text, traceback=fault.traceback)
    # Made without its __init__: each class has its own signature, and text and attributes are already known.
    error = kind.__new__(kind)
    error.args = (fault.text,)
    vars(error).update(fault.attributes)
    error.add_note(f"raised by {fault.method!r} of worker {fault.worker!r}:\n{fault.traceback}")
    return error


def _kind(error: BaseException) -> str:
    for kind in type(error).__mro__:
        if kind.__module__ == errors.__name__:
            return kind.__name__
    return ""


def _sound(value: Plain) -> Plain:
    """A value msgpack can hold: text without lone surrogates, integers of 64 bits."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return float(value) if isinstance(value, int) and value.bit_length() > 63 else value
