"""Episodes that the verifiers package plays: exact tokens, its own rewards, and what breaks costs its episode."""

import asyncio
import os
import re
from pathlib import Path

import msgspec
import pytest

from contraflow.buffer.accounts import accounts
from contraflow.rollout.preflight import check_tasks
from contraflow.types import StopReason
from tests.rollout.harness_lab import Lab, word_folder
from tests.test_loop import recipe_of, run

TASKSETS = str(Path(__file__).parent.parent / "envs" / "tasksets")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return word_folder(tmp_path_factory.mktemp("words"))


@pytest.fixture
def lab_of(tmp_path, words, monkeypatch):
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(TASKSETS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([TASKSETS, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("HOME", str(tmp_path))  # the package keeps a folder per episode there while it lasts

    def lab(taskset, *, options=None, **rest):
        options = {"taskset": taskset, "options": options or {}}
        return Lab(words, tmp_path, name="verifiers", options=options, **rest)

    return lab


def play(lab, indices, *, at_once=False):
    """Episodes by one player, one after the other or all at once; and where each ends among the turns of all."""

    async def main():
        ends, episodes = [], []
        async with asyncio.timeout(100):
            try:
                if at_once:
                    return await asyncio.gather(*(lab.play(index=index, seed=index) for index in indices)), []
                for index in indices:
                    episodes.append(await lab.play(index=index, seed=index))
                    ends.append(len(lab.notes.fed))
                return episodes, ends
            finally:
                await lab.table.close()
                lab.stage.guard.close()

    return asyncio.run(main())


def index_of(lab, how):
    """A task whose reward breaks in the way its taskset was told to, or one that is whole."""
    return next(n for n in range(90) if int(lab.env.task("train", n).facts["row"]) % 2 == (how != "whole"))


def texts(lab):
    gave = [completion.tokens.tolist() for completion in lab.notes.gave]
    return [lab.tokenizer.transcribe([i for i in ids if i != lab.tokenizer.eos]).strip() for ids in gave]


def test_an_episode_of_one_turn_is_worth_what_its_rewards_say(lab_of):
    lab = lab_of(
        "tiny_sums", answer=lambda request: [*lab.tokenizer.encode(str(sums.pop() + len(sums) % 2)), lab.tokenizer.eos]
    )
    sums = [sum(map(int, lab.env.task("train", index).prompt[:-1].split("+"))) for index in reversed(range(6))]
    episodes, _ = play(lab, range(6))
    assert [episode.error for episode in episodes] == [""] * 6
    assert lab.table.desk.counts["sessions"] == lab.table.desk.counts["turns"] == 6
    for index, (episode, said) in enumerate(zip(episodes, texts(lab), strict=True)):
        assert episode.stop is StopReason.STOP
        assert episode.reward == pytest.approx((index % 2 == 1) + 0.5 / (1 + len(said)))  # every other is right
        prompt = lab.env.task("train", index).prompt
        fed = lab.tokenizer.encode("<|im_start|>user\n", special=True) + lab.tokenizer.encode(prompt)
        assert episode.tokens[: len(fed)].tolist() == fed


def test_the_tokens_of_a_conversation_are_those_fed_and_sampled(lab_of):
    lab = lab_of("tiny_talk")
    episodes, ends = play(lab, range(6))
    assert [episode.error for episode in episodes] == [""] * 6
    fed, gave, said, first = lab.notes.fed, lab.notes.gave, texts(lab), 0
    [start] = lab.tokenizer.encode("<|im_start|>", special=True)
    for index, (episode, last) in enumerate(zip(episodes, ends, strict=True)):
        turns = 2 + int(lab.env.task("train", index).facts["row"]) % 3
        assert last - first == turns
        assert episode.reward == pytest.approx(turns + 0.001 * sum(map(len, said[first:last])))
        lab.notes.fed, lab.notes.gave = fed[first:last], gave[first:last]
        lab.assert_exact(episode)
        # The system, then user and model in turns; a mark of the template in what the user says stays letters.
        assert episode.tokens[~episode.trained].tolist().count(start) == 1 + 2 * turns
        first = last


def test_episodes_at_once_keep_to_their_own_sessions(lab_of):
    lab = lab_of("tiny_talk")
    episodes, _ = play(lab, range(12), at_once=True)
    assert [episode.error for episode in episodes] == [""] * 12
    turns = [2 + int(lab.env.task("train", index).facts["row"]) % 3 for index in range(12)]
    assert [int(episode.reward) for episode in episodes] == turns
    for index, episode in enumerate(episodes):
        assert lab.env.task("train", index).prompt.split("\n")[-1] in lab.tokenizer.decode(episode.tokens)


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_new_tokens": 3}, {"context_tokens": 60}])
def test_a_budget_that_runs_out_ends_the_conversation_which_is_scored_as_it_stands(lab_of, limits):
    lab = lab_of("tiny_talk", limits=limits)
    [episode], _ = play(lab, [0])
    assert (episode.error, int(episode.reward)) == ("", len(lab.notes.gave))
    assert lab.table.desk.counts["budget_spent"] == 1
    lab.assert_exact(episode)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raises", "TaskError: tiny_faults: the episode broke: TaskError: .*no idea what this is worth"),
        ("nan", "the task's rewards sum to nan"),
        ("dies", "the player ended with exit code 3"),
        ("hangs", r"asked for nothing within 4 s|scoring_timeout"),
        ("blocks", r"asked for nothing within 4 s"),
    ],
)
def test_a_reward_that_breaks_costs_its_episode_and_the_next_is_whole(lab_of, how, says):
    lab = lab_of("tiny_faults", options={"how": how}, deadline_s=4.0)
    whole, broken = index_of(lab, "whole"), index_of(lab, how)
    (before, fault, after), _ = play(lab, [whole, broken, whole])
    assert (before.error, after.error) == ("", "")
    assert (fault.stop, fault.failed) == (StopReason.ENV_ERROR, True)
    assert re.search(says, fault.error)
    # Its worth is the id of the process that played it: only one that is gone, or stuck for good, is replaced.
    assert (before.reward == after.reward) == (how in ("raises", "nan", "hangs"))
    assert not alive(int(after.reward))
    assert not alive(int(before.reward))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_task_without_a_reward_of_its_own_is_named(lab_of):
    [episode], _ = play(lab_of("tiny_refused"), [0])
    assert "the task has no reward of its own" in episode.error


def test_a_taskset_that_changed_since_its_task_was_posed_is_noticed(lab_of):
    lab = lab_of("tiny_sums")
    pose = lab.env.task
    lab.env.task = lambda split, n: msgspec.structs.replace(
        pose(split, n), facts={**pose(split, n).facts, "hash": "0" * 64}
    )
    [episode], _ = play(lab, [0])
    assert "is not what it was when it was posed" in episode.error
    assert lab.notes.fed == []


def test_a_player_that_cannot_start_says_why(lab_of, monkeypatch):
    lab = lab_of("tiny_sums")
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"].replace(TASKSETS, ""))
    [episode], _ = play(lab, [0])
    assert re.search("the player ended with exit code 1: .*'tiny_sums' not found", episode.error, re.DOTALL)


def test_the_loop_trains_on_episodes_that_the_package_plays(lab_of, tiny_moe, tmp_path):
    lab_of("tiny_sums")  # where its tasksets are found
    recipe = recipe_of(
        tiny_moe,
        run={"steps": 3, "eval_every": 3, "eval_tasks": 4, "stall_s": 100.0},
        env={"name": "verifiers", "options": {"taskset": "tiny_sums"}},
        reward={"parts": {"score": 1.0}},
    )
    asyncio.run(check_tasks(recipe, tiny_moe))
    assert run(recipe, tmp_path / "run").steps == 3
    assert accounts(tmp_path / "run").trained == 12
