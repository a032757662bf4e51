"""Foreign code that raises, hangs, cancels itself, leaves the process or cannot even print its error."""

import asyncio
import threading

import pytest

from contraflow.errors import RewardError, TaskError
from contraflow.rollout.foreign import Foreign


def call(foreign, function, *args, quick=False, fail=TaskError):
    return foreign.call(function, *args, what="step", fail=fail, quick=quick)


def run(scene):
    """Run `scene(foreign)` with a short deadline."""

    async def main():
        foreign = Foreign(0.2, threads=4, max_lost=3)
        try:
            return await scene(foreign)
        finally:
            foreign.close()

    return asyncio.run(main())


async def coroutine(value):
    await asyncio.sleep(0)
    return value


def hands_back_a_coroutine(value):
    return coroutine(value)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("function", [lambda value: value, coroutine, hands_back_a_coroutine])
def test_a_result_comes_back_whatever_kind_of_function_it_is(function, quick):
    assert run(lambda foreign: call(foreign, function, 5, quick=quick)) == 5


def test_plain_functions_run_in_a_thread_and_quick_or_async_ones_do_not():
    async def here():
        return threading.current_thread()

    async def scene(foreign):
        threads = [await call(foreign, threading.current_thread, quick=quick) for quick in (False, True)]
        return [*threads, await call(foreign, here)]

    apart, quick, on_loop = run(scene)
    assert apart is not threading.main_thread()
    assert quick is on_loop is threading.main_thread()


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad"), "step raised ValueError: bad"),
        (StopIteration(), "step raised StopIteration"),
        (SystemExit(3), "step raised SystemExit: 3"),
        (asyncio.CancelledError(), "step raised asyncio.exceptions.CancelledError"),
        (TimeoutError("theirs"), "step raised TimeoutError: theirs"),
        (Unprintable(), "Unprintable"),
        (RewardError("not of this kind"), "RewardError"),
    ],
)
def test_whatever_is_raised_becomes_the_wanted_error(error, words, quick):
    def broken():
        raise error

    async def broken_later():
        await asyncio.sleep(0)
        raise error

    functions = [broken] if isinstance(error, StopIteration) else [broken, broken_later]
    for function in functions:
        with pytest.raises(TaskError, match=words):
            run(lambda foreign, function=function: call(foreign, function, quick=quick))


def test_an_error_of_the_wanted_kind_keeps_its_words():
    def broken():
        raise TaskError("mine")

    with pytest.raises(TaskError, match=r"^mine$"):
        run(lambda foreign: call(foreign, broken))


def test_a_long_error_is_cut():
    def broken():
        raise ValueError("x" * 10_000)

    with pytest.raises(TaskError) as fault:
        run(lambda foreign: call(foreign, broken))
    assert len(str(fault.value)) < 600


def test_a_thread_that_hangs_is_given_up_counted_and_taken_back_when_it_returns():
    release = threading.Event()

    async def scene(foreign):
        with pytest.raises(TaskError, match=r"step did not answer within 0\.2 s"):
            await call(foreign, release.wait)
        assert foreign.lost == 1
        assert await call(foreign, lambda: 7) == 7
        release.set()
        async with asyncio.timeout(5):
            while foreign.lost:
                await call(foreign, lambda: None)

    run(scene)


def test_when_too_many_threads_are_lost_calls_fail_at_once():
    release = threading.Event()

    async def scene(foreign):
        for result in await asyncio.gather(*(call(foreign, release.wait) for _ in range(3)), return_exceptions=True):
            assert isinstance(result, TaskError)
        with pytest.raises(TaskError, match="not called: 3 earlier calls of env or rewards never returned"):
            await call(foreign, lambda: 7)
        assert await call(foreign, coroutine, 7) == 7  # needs no thread
        release.set()

    run(scene)


def test_a_coroutine_that_hangs_is_cancelled_and_one_that_refuses_is_left():
    cancelled = []

    async def hangs():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def refuses(release):
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                cancelled.append(False)

    async def scene(foreign):
        with pytest.raises(TaskError, match="did not answer"):
            await call(foreign, hangs)
        release = asyncio.Event()
        with pytest.raises(TaskError, match="did not answer"):
            await call(foreign, refuses, release)
        await asyncio.sleep(0)
        release.set()

    run(scene)
    assert cancelled == [True, False]


def test_a_caller_that_is_cancelled_leaves_its_thread_counted():
    release = threading.Event()

    async def scene(foreign):
        caller = asyncio.ensure_future(call(foreign, release.wait))
        await asyncio.sleep(0.02)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert foreign.lost == 1
        release.set()

    run(scene)


def test_more_calls_than_threads_wait_their_turn_and_threads_are_used_again():
    names = set()

    def note():
        names.add(threading.current_thread().ident)

    async def scene(foreign):
        await asyncio.gather(*(call(foreign, note) for _ in range(100)))

    run(scene)
    assert len(names) <= 8
