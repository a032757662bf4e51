"""What every reward part promises: a pure number in [0, 1], whatever was said; full marks for what is right."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.registry import PARTS, make_mix
from contraflow.types import StopReason, Task

TASKS = st.builds(
    Task,
    key=st.just("train/0"),
    prompt=st.text(max_size=10),
    reference=st.text(max_size=10),
    facts=st.just({"format": r"[0-9]+", "refused": "?="}),
)
TURNS = st.lists(st.builds(Said, st.sampled_from(["prompt", "model", "env"]), st.text(max_size=30)), max_size=6)
TRANSCRIPTS = st.builds(Transcript, TURNS.map(tuple), st.sampled_from(list(StopReason)))


SPOKEN = {"score"}  # what the environment says, which tests/envs/test_reasoning_gym.py holds it to
TASTES = {"even", "even_once"}  # know no reference and no full marks: tests/rewards/test_rules.py
JUDGES = sorted(set(PARTS) - SPOKEN - TASTES)


@pytest.fixture(params=JUDGES)
def part(request):
    return PARTS[request.param]


def test_a_part_gives_the_same_number_between_0_and_1(part):
    @settings(max_examples=200)
    @given(TASKS, TRANSCRIPTS)
    def check(task, transcript):
        score = part(task, transcript)
        assert 0 <= score <= 1
        assert part(task, transcript) == score

    check()


@pytest.mark.parametrize("name", sorted(set(JUDGES) - {"tool"}))
def test_the_reference_gets_full_marks(name):
    @settings(max_examples=100)
    @given(st.from_regex(r"[0-9]{1,9}", fullmatch=True).filter(str.isascii))
    def check(reference):
        task = Task(key="train/0", prompt="", reference=reference, facts={"format": "[0-9]+"})
        transcript = Transcript((Said("model", reference),), StopReason.STOP)
        assert PARTS[name](task, transcript) == 1

    check()


@given(TASKS, TRANSCRIPTS, st.dictionaries(st.sampled_from(JUDGES), st.floats(-5, 5), min_size=1))
def test_a_mix_is_linear_in_its_weights(task, transcript, weights):
    if not any(weights.values()):
        weights["correct"] = 1.0
    reward, parts = make_mix(weights).score(task, transcript)
    assert reward == pytest.approx(sum(weights[name] * parts[name] for name in weights))
