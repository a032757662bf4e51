"""reasoning_gym's data sets as tasks: its own scores, splits that never meet, and refusals that say what to do."""

import threading

import msgspec
import pytest

from contraflow.envs.reasoning_gym import _UNSTABLE, extract
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError, RewardError, TaskError
from contraflow.rewards.base import Said, Transcript
from contraflow.rewards.registry import make_mix
from contraflow.types import StopReason, Task

# What a data set without ready answers, or with costly items, needs to be of use; all others are made as they are.
SLOW = {"acre", "futoshiki", "intermediate_integration", "zebra_puzzles", "arc_agi"}


def made(name, *, options=None, **rest):
    pytest.importorskip("reasoning_gym")
    return make_env("reasoning_gym", {"datasets": [{"name": name, "options": options or {}}], **rest})


def scored(task, text, said, stop=StopReason.STOP):
    turns = (Said("prompt", task.prompt), Said("model", text), Said("env", said))
    return make_mix({"score": 1.0}).score(task, Transcript(turns, stop))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("so <answer> 5\n</answer>.", "5"),
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        ("<answer></answer>", ""),
        ("5", None),
        ("<answer>5", None),
        ("", None),
    ],
)
def test_the_last_tagged_answer_counts(text, answer):
    assert extract(text) == answer


def test_score_and_correct_are_what_the_environment_said():
    task = Task(key="train/0", prompt="?", reference="5", facts={"scored": "env"})
    assert scored(task, "x", "0.25") == (0.25, {"correct": 0.0, "score": 0.25})
    assert scored(task, "x", "1.0") == (1.0, {"correct": 1.0, "score": 1.0})
    assert scored(task, "5", "1.0", StopReason.LENGTH) == (0.0, {"correct": 0.0, "score": 0.0})


@pytest.mark.parametrize("said", ["", "full marks", "1,0"])
def test_an_environment_that_scores_and_says_no_number_is_named(said):
    task = Task(key="train/0", prompt="?", reference="5", facts={"scored": "env"})
    with pytest.raises(RewardError, match="which is no number"):
        scored(task, "5", said)


def test_score_needs_an_environment_that_scores():
    with pytest.raises(RewardError, match=r"needs an environment that scores by itself, which task 'train/0' is not"):
        scored(Task(key="train/0", prompt="?", reference="5"), "5", "1")


@pytest.mark.parametrize("answer", ["tagged", "whole"])
def test_the_data_sets_own_scorer_marks_the_answer(answer):
    env = made("chain_sum", answer=answer)
    task = env.task("train", 7)
    right = env.open(task).step(task.reference)
    assert (right.text, right.done) == ("1.0", True)
    number = task.reference.replace("<answer>", "").replace("</answer>", "")
    padded = f"<answer>{number} of course</answer>" if answer == "tagged" else f"{number} of course"
    assert 0 < float(env.open(task).step(padded).text) < 1  # its scorer gives a share where the answer is within
    assert float(env.open(task).step("<answer>nothing</answer>").text) == 0


def test_an_untagged_answer_earns_nothing_where_tags_are_asked_for():
    env = made("chain_sum")
    task = env.task("train", 7)
    assert env.open(task).step(task.reference.removeprefix("<answer>")).text == "0"


def test_only_what_is_asked_for_is_asked_and_the_prompt_is_written_around_it():
    env = made("chain_sum", ask="[0-9]+.*=", prompt="Q: {question}\nA: ", options={"min_terms": 2, "max_terms": 2})
    prompt = env.task("train", 3).prompt
    assert prompt.startswith("Q: ")
    assert prompt.endswith("=\nA: ")
    assert "State" not in prompt


def test_a_list_in_a_recipe_may_stand_for_a_tuple():
    env = made("basic_arithmetic", options={"operators": ["+"]})
    assert {sign for n in range(30) for sign in "-*/" if f" {sign} " in env.task("train", n).prompt} == set()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "env.options.datasets is missing"),
        ({"datasets": []}, "env.options.datasets = []"),
        ({"datasets": [{"name": "chain_sum", "options": {"size": 3}}]}, "'size' is not for a recipe"),
        ({"datasets": [{"name": "chain_sum"}], "ask": "("}, "no regular expression"),
        ({"datasets": [{"name": "chain_sum"}], "prompt": "?"}, "it has to hold {question}"),
    ],
)
def test_options_that_do_not_fit_are_refused_without_the_package(options, says):
    with pytest.raises(ConfigError) as refusal:
        make_env("reasoning_gym", options)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("chain_sums", {}, "is none of reasoning_gym's: ab, acre"),
        ("ransom_note", {}, "its items change from process to process"),
        ("chain_sum", {"terms": 3}, "chain_sum has no 'terms'; allowed: min_terms, max_terms"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "chain_sum refuses its options: AssertionError"),
    ],
)
def test_a_data_set_that_is_unknown_or_refuses_is_named(name, options, says):
    with pytest.raises(ConfigError) as refusal:
        made(name, options=options)
    assert says in str(refusal.value)


def test_a_data_set_with_too_few_questions_says_so():
    env = made("chain_sum", options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, ask="=")
    with pytest.raises(TaskError, match=r"chain_sum: no (train|test) question in 200 items"):
        [env.task(split, 0) for split in ("train", "test")]


def test_an_item_that_changed_since_it_was_posed_is_not_scored():
    env = made("chain_sum")
    task = msgspec.structs.replace(env.task("train", 3), prompt="1 + 1 =")
    with pytest.raises(TaskError, match=r"chain_sum: item \d+ is not what it was when task 'train/3' was posed"):
        env.open(task)


def test_threads_get_the_same_tasks():
    env = made("chain_sum")
    expected = [env.task("train", index) for index in range(40)]
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: [env.task("train", i) for i in range(40)]}))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(found[n] == expected for n in range(4))


@pytest.mark.slow
def test_every_data_set_of_the_package_can_be_played_or_says_why_not():
    gym = pytest.importorskip("reasoning_gym")
    refused = {}
    for name in sorted(set(gym.factory.DATASETS) - SLOW - {"composite"} - set(_UNSTABLE)):
        try:
            env = made(name)
            for split in ("train", "test"):
                task = env.task(split, 5)
                assert task == made(name).task(split, 5), name
                assert env.open(task).step(task.reference).text == "1.0", name
        except (ConfigError, TaskError) as fault:
            refused[name] = str(fault)
    assert set(refused) <= {"boxnet", "graph_color", "rush_hour"}, refused  # they hold no answer that is text
