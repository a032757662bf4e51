"""Cases and their comparing, without and with real runs."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow import config
from contraflow.errors import RewardError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.code import Case, passes, program_of, read_cases
from contraflow.rewards.registry import make_mix
from contraflow.rewards.sandbox.pool import Ran
from contraflow.rewards.sandbox.values import tokens_of
from contraflow.types import StopReason, Task


def task_of(*tests):
    return Task(key="train/3", prompt="", reference="", facts={"tests": json.dumps(tests)})


def ran(stdout=b"", result=b"", end="done"):
    return Ran(end=end, stdout=stdout, stderr=b"", result=result, cpu_s=0.0, wall_s=0.0)


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)"),
        ("```py\nfirst\n```\nor rather\n```\nsecond\n\nline\n```", "second\n\nline"),
        ("```Python3\nnot closed", "not closed"),
        ("", ""),
    ],
)
def test_the_program_is_the_last_block_or_the_whole_answer(answer, program):
    assert program_of(answer) == program


@pytest.mark.parametrize(
    ("check", "call", "value"),
    [
        ("assert f(2) == 4", "f(2)", 4),
        ("  assert f('a', b=[1]) == {'x': (1, {2})}, 'why'  ", "f('a', b=[1])", {"x": (1, {2})}),
        ("assert f() is None", "f()", None),
        ("assert f(1) is False", "f(1)", False),
        ("assert f(1)", "f(1)", True),
        ("assert not f(1)", "f(1)", False),
        ("assert sorted(f([3, 1])) == [1, -3.5]", "sorted(f([3, 1]))", [1, -3.5]),
    ],
)
def test_an_assertion_is_split_into_what_is_asked_and_what_is_expected(check, call, value):
    (case,) = read_cases(task_of({"assert": check}))
    assert case == Case(call=call, tokens=tuple(tokens_of(value)))


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (None, "need facts\\['tests'\\], which task 'train/3' lacks"),
        ("[", "facts\\['tests'\\] of task 'train/3'"),
        ("[]", "is empty"),
        ('[{"stdin": "1"}]', "case 0 of task 'train/3': say either"),
        ('[{"stdout": "1", "assert": "assert f()"}]', "say either"),
        ('[{"stdot": "1"}]', "unknown field `stdot`"),
        ('[{"stdout": "1"}, {"assert": "f(2) == 4"}]', "case 1 .*not one assert"),
        ('[{"assert": "assert abs(f(1) - 2.5) < 0.1"}]', "have to be believed"),
        ('[{"assert": "assert f(1) == g(1)"}]', "malformed node"),
        ('[{"assert": "assert f(1) == 1 == 1"}]', "have to be believed"),
        ('[{"assert": "assert f(1) is 1"}]', "None, True and False only"),
        ('[{"assert": "assert f(1) == 1j"}]', "none of the types"),
        ('[{"assert": "assert ("}]', "is none of"),
    ],
)
def test_a_case_that_cannot_be_judged_is_named(tests, words):
    task = Task(key="train/3", prompt="", reference="", facts={} if tests is None else {"tests": tests})
    with pytest.raises(RewardError, match=words):
        read_cases(task)


@pytest.mark.parametrize(
    ("expected", "stdout", "same"),
    [
        ("1\n2\n", b"1\n2", True),
        ("1\n2", b"1  \n2\t\n\n\n", True),
        ("1\n2", b"1\r\n2\r\n", True),
        ("", b"\n", True),
        ("1 2", b"1  2", False),
        (" 1", b"1", False),
        ("1\n\n2", b"1\n2", False),
        ("\ufffd", b"\xff", True),
    ],
)
def test_output_is_compared_line_by_line_without_white_space_at_ends(expected, stdout, same):
    assert passes(Case(expected=expected), ran(stdout)) is same
    assert not passes(Case(expected=expected), ran(stdout, end="failed"))


@given(st.binary(max_size=60))
def test_whatever_a_program_writes_is_a_verdict(result):
    case = Case(call="f()", tokens=tuple(tokens_of([1.5, "a"])), tolerance=0.1)
    assert passes(case, ran(result=result)) is False
    assert passes(Case(call="f()", tokens=("none",)), ran(result=result)) is False


@pytest.mark.parametrize(
    ("value", "close"),
    [([1.0, "a"], True), ([1.05, "a"], True), ([1.2, "a"], False), ([1, "b"], False), ([1], False), ((1, "a"), False)],
)
def test_a_tolerance_is_for_numbers_only(value, close):
    case = Case(call="f()", tokens=tuple(tokens_of([1.0, "a"])), tolerance=0.1)
    assert passes(case, ran(result=json.dumps(tokens_of(value)).encode())) is close


@pytest.mark.parametrize(
    "result", [b"[" * 100_000, b'["n' + b"f" * 5000 + b'", "sa"]', b"{}", b'["nnan"]', b"null", b""]
)
def test_hostile_results_are_wrong_and_nothing_else(result):
    case = Case(call="f()", tokens=tuple(tokens_of([1.0, "a"])), tolerance=0.1)
    assert passes(case, ran(result=result)) is False


@pytest.fixture(scope="module")
def mix():
    made = make_mix({"code": 1.0, "code_share": 0.5}, correct_part="code", sandbox=config.Sandbox(processes=1))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("program", "share"),
    [
        ("def f(x): return x * 2\nif __name__ == '__main__': print(sum(map(int, input().split())))", 1.0),
        ("def f(x): return x * 2\nprint(6)", 1.0),
        ("def f(x): return 4\nprint(sum(map(int, input().split())))", 2 / 3),
        ("print(6)", 1 / 3),
        ("syntax error", 0.0),
        ("", 0.0),
    ],
)
def test_a_program_is_scored_by_the_cases_it_passes(mix, program, share):
    task = task_of({"stdin": "1 2 3\n", "stdout": "6\n"}, {"stdin": "0", "assert": "assert f(2) == 4"},
                   {"stdin": "0", "assert": "assert f('ab') == 'abab'"})  # fmt: skip
    transcript = Transcript((Said("prompt", "?"), Said("model", f"So:\n```python\n{program}\n```")), StopReason.STOP)
    reward, parts = mix.score(task, transcript)
    whole = float(share == 1)
    assert parts == {"code": whole, "code_share": pytest.approx(share), "correct": whole}
    assert reward == pytest.approx(whole + share / 2)


def test_an_answer_that_was_cut_off_earns_nothing(mix):
    cut = Transcript((Said("model", "def f(x): return x\nprint(1)"),), StopReason.LENGTH)
    assert mix.score(task_of({"stdout": "1"}), cut)[0] == 0


def test_cases_that_are_not_reached_in_time_are_failed():
    made = make_mix({"code_share": 1.0}, sandbox=config.Sandbox(processes=1, total_s=1.0, cpu_s=30))
    try:
        cases = [{"assert": "assert f() == 1"}, *[{"stdin": "x", "stdout": "x"}] * 5]
        program = "import time\ndef f(): return 1\nif not (input() if False else 0): time.sleep(0.7)\nprint('x')"
        reward, _ = made.score(task_of(*cases), Transcript((Said("model", program),), StopReason.STOP))
    finally:
        made.close()
    assert reward == pytest.approx(1 / 6)
