"""The judge against a real endpoint on this host: right scores, every fault of a server, a key that stays secret."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.config import Judge, check_recipe
from contraflow.errors import ConfigError, JudgeError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.judge import MAX_BYTES, fill, open_judge
from contraflow.rewards.registry import make_mix
from contraflow.types import StopReason, Task
from tests.rewards.judge_twin import JudgeTwin, say

TASK = Task(key="train/0", prompt="2+2=", reference="4")
KEY = "sk-very-secret"


def answered(text, stop=StopReason.STOP):
    return Transcript((Said("prompt", TASK.prompt), Said("model", text)), stop)


def in_turn(*steps):
    """A script that takes one step a request, and repeats the last."""
    left = list(steps)

    def script(twin, handler, question):
        (left.pop(0) if len(left) > 1 else left[0])(handler)

    return script


def verdict(text):
    return lambda handler: say(handler, text)


def failing(status, *headers):
    return lambda handler: say(handler, None, status=status, headers=headers, raw=b'{"error": "no"}')


def half(handler):
    say(handler, "[[7]]", headers=[("Content-Length", "500")])


def hang_up(handler):
    handler.connection.close()


def endless(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(2 * MAX_BYTES // 65536):
        handler.wfile.write(b" " * 65536)


@pytest.fixture
def judged():
    twins = []

    def make(script, *, key=KEY, **section):
        twin = JudgeTwin(script)
        twins.append(twin)
        settings = {"url": twin.url, "model": "m", "key_env": "JUDGE_KEY", "deadline_s": 5.0, **section}
        return twin, open_judge(Judge(**settings), {"JUDGE_KEY": key}, time.monotonic)

    yield make
    for twin in twins:
        twin.close()


@pytest.mark.parametrize(
    ("text", "score"),
    [("[[10]]", 1.0), ("well, [[7]]", 0.7), ("[[3]] or rather [[ 2.5 ]]", 0.25), ("[[0]]", 0.0), ("[[010]]", 1.0)],
)
def test_the_last_score_counts_as_a_share_of_full_marks(judged, text, score):
    _, part = judged(in_turn(verdict(text)))
    assert part(TASK, answered("4")) == pytest.approx(score)


def test_what_is_asked_is_the_filled_template_at_the_right_place_with_the_key(judged):
    twin, part = judged(in_turn(verdict("[[1]]")), prompt="{prompt}|{reference}|{answer}", max_tokens=9)
    part(TASK, answered(" 4 {reference} "))
    assert twin.questions == ["2+2=|4|4 {reference}"]
    assert twin.paths == ["/v1/chat/completions"]
    assert twin.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert {k: v for k, v in twin.bodies[0].items() if k != "messages"} == {
        "model": "m",
        "temperature": 0,
        "max_tokens": 9,
    }


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_a_filled_slot_is_never_filled_again(prompt, answer, reference):
    filled = fill("<{prompt}|{answer}|{reference}>", prompt=prompt, answer=answer, reference=reference)
    assert filled == f"<{prompt}|{answer}|{reference}>"


def test_an_answer_that_was_cut_off_is_worth_nothing_and_not_asked_about(judged):
    twin, part = judged(in_turn(verdict("[[10]]")))
    assert part(TASK, answered("4", StopReason.LENGTH)) == 0
    assert twin.questions == []


@pytest.mark.parametrize(
    "fault",
    [failing(429), failing(500), failing(503), half, hang_up, verdict("no idea"), verdict("[[11]]"), verdict(None)],
    ids=["429", "500", "503", "half a body", "hang up", "no score", "beyond full marks", "no text"],
)
def test_what_may_pass_is_tried_again(judged, fault):
    twin, part = judged(in_turn(fault, verdict("[[5]]")))
    assert part(TASK, answered("4")) == 0.5
    assert len(twin.questions) == 2


def test_the_server_says_how_long_to_wait(judged):
    began = time.monotonic()
    _, part = judged(in_turn(failing(429, ("Retry-After", "0.8")), verdict("[[5]]")))
    assert part(TASK, answered("4")) == 0.5
    assert time.monotonic() - began >= 0.8


def test_a_wait_beyond_the_deadline_is_not_begun(judged):
    began = time.monotonic()
    _, part = judged(in_turn(failing(429, ("Retry-After", "3600"))))
    with pytest.raises(JudgeError, match=r"busy: status 429.*after 1 tries"):
        part(TASK, answered("4"))
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404])
def test_a_refusal_is_an_error_at_once(judged, status):
    twin, part = judged(in_turn(failing(status, ("Location", "http://elsewhere/"))))
    with pytest.raises(JudgeError, match=f"refused: status {status}") as error:
        part(TASK, answered("4"))
    assert (error.value.kind, len(twin.questions)) == ("refused", 1)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda handler: say(handler, None, raw=b"<html>"), "malformed"),
        (lambda handler: say(handler, None, raw=b"[" * 100_000), "malformed"),
        (lambda handler: say(handler, None, raw=b'{"choices": []}'), "malformed"),
        (endless, "malformed"),
        (half, "unreachable"),
    ],
    ids=["html", "nested", "empty", "huge", "half"],
)
def test_what_never_mends_ends_at_the_deadline_with_its_kind(judged, fault, kind):
    _, part = judged(in_turn(fault), deadline_s=0.6)
    with pytest.raises(JudgeError) as error:
        part(TASK, answered("4"))
    assert error.value.kind == kind
    assert "tries" in str(error.value)


def test_a_silent_server_is_left_at_the_deadline_of_an_attempt(judged):
    def script(twin, handler, question):
        twin.released.wait(20)

    _, part = judged(script, attempt_s=0.2, deadline_s=1.0)
    began = time.monotonic()
    with pytest.raises(JudgeError) as error:
        part(TASK, answered("4"))
    assert (error.value.kind, time.monotonic() - began < 3) == ("late", True)


def test_a_server_that_drips_is_left_at_the_deadline_too(judged):
    def script(twin, handler, question):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not twin.released.wait(0.05):
            handler.wfile.write(b" ")

    _, part = judged(script, attempt_s=0.3, deadline_s=0.5)
    began = time.monotonic()
    with pytest.raises(JudgeError, match="late"):
        part(TASK, answered("4"))
    assert time.monotonic() - began < 3


def test_nobody_listening_is_named():
    part = open_judge(Judge(url="http://127.0.0.1:9", model="m", deadline_s=0.3), {}, time.monotonic)
    with pytest.raises(JudgeError, match=r"judge http://127\.0\.0\.1:9 unreachable: ConnectionRefusedError"):
        part(TASK, answered("4"))


def test_equal_questions_are_asked_once_and_failures_are_not_remembered(judged):
    twin, part = judged(in_turn(failing(400), verdict("[[5]]")))
    with pytest.raises(JudgeError):
        part(TASK, answered("4"))
    assert [part(TASK, answered("4")) for _ in range(5)] == [0.5] * 5
    assert part(TASK, answered("5")) == 0.5
    assert len(twin.questions) == 3


def test_the_oldest_verdict_is_forgotten_first(judged):
    twin, part = judged(in_turn(verdict("[[5]]")), remembered=2, prompt="{answer}")
    for answer in ("a", "b", "a", "c", "a", "b"):
        part(TASK, answered(answer))
    assert twin.questions == ["a", "b", "c", "b"]


def test_many_at_once_stay_within_the_bound_and_share_equal_questions(judged):
    gate = threading.Event()

    def script(twin, handler, question):
        if twin.most == 3:
            gate.set()
        gate.wait(5)
        say(handler, "[[5]]")

    twin, part = judged(script, concurrency=3)
    with ThreadPoolExecutor(16) as pool:
        scores = list(pool.map(lambda n: part(TASK, answered(str(n % 8))), range(32)))
    assert scores == [0.5] * 32
    assert twin.most == 3
    assert len(twin.questions) == 8


@pytest.mark.parametrize("status", [401, 500])
def test_the_key_is_in_no_error_even_when_the_server_repeats_it(judged, status):
    _, part = judged(
        in_turn(lambda handler: say(handler, None, status=status, raw=f"bad key {KEY}".encode())), deadline_s=0.2
    )
    with pytest.raises(JudgeError) as error:
        part(TASK, answered("4"))
    assert KEY not in f"{error.value!r} {error.value.__cause__!r} {vars(error.value)}"
    assert "bad key ***" in str(error.value)


@pytest.mark.parametrize(
    ("section", "environ", "says"),
    [
        ({}, {}, "reward.judge.url is empty"),
        ({"url": "http://a"}, {}, "reward.judge.model is empty"),
        ({"url": "http://a", "model": "m", "key_env": "K"}, {}, "names K, which is not set"),
        ({"url": "http://a", "model": "m", "key_env": "K"}, {"K": "a b\n"}, "the key in K has a space"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused_before_anything_starts(section, environ, says):
    with pytest.raises(ConfigError, match=says) as refusal:
        open_judge(Judge(**section), environ, time.monotonic)
    assert "a b" not in str(refusal.value)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"url": "http://me:pw@host"}, "not of the form"),
        ({"url": "ftp://host"}, "not of the form"),
        ({"key_env": "sk-123"}, "not the name of an environment variable"),
        ({"prompt": "?"}, "has no {answer}"),
        ({"score": "("}, "no regular expression"),
        ({"score": "[0-9]"}, "has 0 groups"),
    ],
)
def test_settings_of_a_judge_that_do_not_fit_are_named(section, says):
    with pytest.raises(ConfigError) as refusal:
        check_recipe({"reward": {"judge": section}})
    assert says in str(refusal.value)
    assert "pw" not in str(refusal.value)


def test_a_judge_that_would_be_cut_off_is_refused():
    with pytest.raises(ConfigError, match=r"env\.step_deadline_s = 10 with reward\.judge\.deadline_s = 60"):
        check_recipe({"reward": {"parts": {"judge": 1.0}}})


def test_a_judge_is_a_part_of_a_mix(judged):
    twin, _ = judged(in_turn(verdict("[[5]]")))
    mix = make_mix({"judge": 2.0}, judge=Judge(url=twin.url, model="m"))
    assert mix.score(TASK, answered("4")) == (1.0, {"correct": 1.0, "judge": 0.5})
    assert not mix.bounded
