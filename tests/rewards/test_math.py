"""Answers judged by the real math-verify."""

import importlib.util

import pytest

from contraflow import config
from contraflow.errors import ConfigError, RewardError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.registry import make_mix
from contraflow.types import StopReason, Task

INSTALLED = importlib.util.find_spec("math_verify") is not None
needed = pytest.mark.skipif(not INSTALLED, reason="needs math-verify")


@pytest.fixture(scope="module")
def score():
    mix = make_mix({"math": 1.0}, correct_part="math", sandbox=config.Sandbox(processes=1, cpu_s=1, wall_s=20.0))

    def score(reference, answer):
        task = Task(key="train/0", prompt="", reference=reference)
        return mix.score(task, Transcript((Said("model", answer),), StopReason.STOP))[1]["correct"]

    yield score
    mix.close()


EQUAL = [
    ("1/2", "1/2"),
    ("1/2", "0.5"),
    (r"\frac{1}{2}", "$0.5$"),
    (r"\frac{1}{2}", r"The answer is $\frac{3}{6}$."),
    ("12", r"So it is 12, hence \boxed{12}."),
    ("12", "twelve, that is 12"),
    ("-3", r"\boxed{-3}"),
    ("1000", "$1,000$"),
    (r"\sqrt{8}", r"$2\sqrt{2}$"),
    (r"x^2+2x+1", r"$(x+1)^2$"),
    (r"\{1,2,3\}", r"$\{3,2,1\}$"),
    ("(1,2)", "$(1, 2)$"),
    ("[1,2)", "[1,2)"),
    (r"[1,2)\cup(3,4]", r"$[1,2) \cup (3,4]$"),
    (r"(-\infty, 3]", r"$(-\infty,3]$"),
    ("5", r"$5\text{ cm}$"),
    ("5 cm", "$5$"),
    (r"50\%", r"$50\%$"),
    ("x=5", "$x=5$"),
    ("x=5", "$5$"),
    (r"\pi", r"$\pi$"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$"),
    ("2^{10}", "$1024$"),
    (r"\log_2 8", "$3$"),
]
UNEQUAL = [
    ("1/2", "2"),
    ("1/2", "0.51"),
    ("12", ""),
    ("12", "I do not know."),
    ("12", r"\boxed{13}"),
    (r"\{1,2,3\}", r"$\{1,2\}$"),
    ("[1,2)", "$[1,2]$"),
    ("[1,2)", "$(1,2)$"),
    (r"x^2+2x+1", r"$x^2+2x$"),
    ("x=5", "$x=6$"),
    (r"\sqrt{2}", "$2$"),
    (r"\pi", "$3.14$"),
]
HOSTILE = [
    "10**10**10",
    "$10^{10^{10}}$",
    "$9^{9^{9^{9}}}!$",
    "$" + r"\frac{" * 2000 + "1" + "}{2}" * 2000 + "$",
    "$" + "(" * 50_000,
    r"\boxed{" * 10_000,
    "$" + "+".join(["x"] * 20_000) + "$",
    "$" + "9" * 200_000 + "$",
    "\0\ud800\u202e$5",
    "$__import__('os')._exit(0)$",
    "__import__('os').system('id')",
    r"\boxed{exit(0)}",
    r"$\int_0^\infty \frac{\sin(x^{x^{x}})}{x^{x}} dx$",
    r"$\sum_{n=1}^{10^{100}} \frac{1}{n^n}$",
]
QUICK = (0, 8, 9)  # the others use their limits up


@needed
@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_answers_that_are_equal_as_mathematics_earn_1(score, reference, answer):
    assert score(reference, answer) == 1


@needed
@pytest.mark.parametrize(("reference", "answer"), UNEQUAL)
def test_answers_that_are_not_earn_0(score, reference, answer):
    assert score(reference, answer) == 0


@needed
@pytest.mark.parametrize(
    "answer",
    [
        answer if place in QUICK else pytest.param(answer, marks=pytest.mark.slow)
        for place, answer in enumerate(HOSTILE)
    ],
    ids=range(len(HOSTILE)),
)
def test_a_hostile_answer_earns_0_and_the_next_is_judged(score, answer):
    assert score("7", answer) == 0
    assert score("7", "$7$") == 1


@needed
@pytest.mark.parametrize("reference", ["", "   ", "$$"])
def test_a_reference_that_is_no_mathematics_is_named(score, reference):
    with pytest.raises(RewardError, match="cannot read the reference"):
        score(reference, "$7$")


@pytest.mark.skipif(INSTALLED, reason="math-verify is installed")
def test_without_the_package_the_part_is_refused_with_what_to_install():
    with pytest.raises(ConfigError, match=r"pip install 'contraflow\[math\]'"):
        make_mix({"math": 1.0})
