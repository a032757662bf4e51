"""Runs one program in a process that has nothing left to lose, and writes what it gave. All of it may be broken.

Takes file descriptors; never returns. Nothing in here knows what the right answer is.
"""

import atexit
import json
import os
import random
import sys
import threading
import traceback
import types
from typing import Any, NoReturn, TextIO, cast

from contraflow.rewards.sandbox.values import tokens_of

RESULT, PROGRAM = 3, 4  # descriptors, beside 0, 1 and 2


def run_program() -> NoReturn:
    """Run the program as `__main__`, then evaluate its call, if it has one, and write the value's tokens."""
    with open(PROGRAM, encoding="utf-8", errors="surrogatepass") as file:
        program = json.load(file)
    _open_streams()
    random.seed(0)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    code = _guarded(_execute, program["source"], program["call"], main.__dict__)
    threading._shutdown()  # type: ignore[attr-defined] # as the interpreter ends: threads, then what atexit was told
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _execute(source: str, call: str, names: dict[str, Any]) -> None:
    exec(compile(source, "<program>", "exec", dont_inherit=True), names)
    if call:
        value = eval(compile(call, "<test>", "eval", dont_inherit=True), names)
        with open(RESULT, "w", encoding="utf-8") as file:
            json.dump(tokens_of(value), file)


def _guarded(function: Any, *args: Any) -> int:
    """What the interpreter's exit code would be."""
    try:
        function(*args)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        return 1
    except BaseException:  # noqa: BLE001 - whatever it is, it is the program's failure
        traceback.print_exc()
        return 1
    return 0


def _open_streams() -> None:
    sys.stdin = _stream(0, "r")
    sys.stdout = _stream(1, "w")
    sys.stderr = _stream(2, "w", errors="backslashreplace")


def _stream(descriptor: int, mode: str, errors: str = "strict") -> TextIO:
    return cast(TextIO, open(descriptor, mode, encoding="utf-8", errors=errors, closefd=False))
