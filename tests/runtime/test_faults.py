"""Errors keep their type, text and attributes on the way; strangers are described."""

import pytest

from contraflow import errors
from contraflow.errors import ContraflowError, DeadlineExceeded, EngineError, RemoteError
from contraflow.runtime.faults import Fault, from_fault, to_fault
from contraflow.runtime.wire import decode, encode


def travel(error: BaseException) -> ContraflowError:
    return from_fault(decode(encode(to_fault(error, worker="w", method="m")), Fault))


def test_every_class_of_the_package_keeps_its_type_and_text() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, ContraflowError)]
    made = {
        errors.RemoteError: RemoteError("w", "m", type="T", text="t", traceback="tb"),
        errors.WorkerDied: errors.WorkerDied("w", "gone"),
        errors.DeadlineExceeded: DeadlineExceeded("o", "c", 2.5),
        errors.JudgeError: errors.JudgeError("http://j", "late", "some text"),
        errors.ServerError: errors.ServerError("http://s", "late", "some text"),
    }
    for kind in kinds:
        error = made.get(kind) or kind("some text")
        back = travel(error)
        assert type(back) is kind
        assert str(back) == str(error)
        assert {k: v for k, v in vars(back).items() if k != "__notes__"} == vars(error)


def test_a_private_subclass_arrives_as_its_nearest_public_class() -> None:
    class TooLong(EngineError):
        pass

    error = TooLong("prompt of 900 tokens")
    back = travel(error)
    assert type(back) is EngineError
    assert str(back) == "prompt of 900 tokens"


def test_a_stranger_becomes_a_remote_error_with_its_traceback() -> None:
    try:
        {}["key"]
    except KeyError as error:
        back = travel(error)
    assert isinstance(back, RemoteError)
    assert (back.worker, back.method, back.type, back.text) == ("w", "m", "KeyError", "'key'")
    assert "test_faults.py" in back.traceback


def test_attributes_that_are_not_plain_are_left_behind() -> None:
    error = EngineError("x")
    error.request, error.tokens, error.huge = object(), 900, 2**80  # type: ignore[attr-defined]
    back = travel(error)
    assert not hasattr(back, "request")
    assert (back.tokens, back.huge) == (900, float(2**80))  # type: ignore[attr-defined]


def test_text_that_is_not_unicode_still_travels() -> None:
    assert str(travel(EngineError("file \udcff.bin"))) == "file \\udcff.bin"


@pytest.mark.parametrize("kind", ["os", "Exception", "__name__", "NoSuchError", "annotations"])
def test_a_kind_that_is_no_error_of_the_package_is_never_made(kind: str) -> None:
    fault = Fault("w", "m", kind, "T", "text", "", {})
    assert type(from_fault(fault)) is RemoteError
