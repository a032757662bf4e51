"""Episodes that outside programs play: exact tokens, refused edits, deadlines, deaths, and real programs."""

import asyncio
import dataclasses
import os
import select
import sys
import textwrap
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError, ServerError
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.rollout.draft import Draft
from contraflow.rollout.episode import play
from contraflow.rollout.http import HttpClient
from contraflow.types import StopReason
from tests.rollout.harness_lab import Lab, word_folder


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return word_folder(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("letters")
    build_char_tokenizer(folder)
    return folder


@pytest.fixture
def lab_of(tmp_path, words):
    return lambda options=None, *, folder=None, **rest: Lab(folder or words, tmp_path, options=options or {}, **rest)


def user(text):
    return {"role": "user", "content": text}


async def chat(client, path, messages, **rest):
    body = await client.post(f"{path}/chat/completions", {"model": "policy", "messages": messages, **rest})
    return body["choices"][0] | {"usage": body["usage"]}


async def chat_on(client, path, messages, **rest):
    """Ask, and note the answer; what the model said."""
    answer = await chat(client, path, messages, **rest)
    messages.append(answer["message"])
    return answer["message"]["content"]


def code_of(error):
    return str(error.value).split('"code": "')[1].split('"')[0]


SAID = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\ue001"), max_size=12) | st.sampled_from(
    ["<|im_end|>", "\n\n", "the", " there", "then<|im_start|>"]
)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    system=st.none() | SAID,
    turns=st.lists(st.tuples(SAID, st.none() | st.integers(1, 5), st.booleans()), min_size=1, max_size=5),
    stripped=st.booleans(),
)
def test_the_tokens_of_a_chat_are_those_fed_and_sampled(words, tmp_path_factory, seed, system, turns, stripped):
    lab = Lab(words, tmp_path_factory.mktemp("run"), options={}, seed=seed)
    told = []

    async def harness(client, path):
        messages = [] if system is None else [{"role": "system", "content": system}]
        for said, most, as_tool in turns:
            messages.append({"role": "tool" if as_tool else "user", "content": said})
            answer = await chat(client, path, messages, return_token_ids=True, max_tokens=most)
            told.append((answer["prompt_token_ids"], answer["token_ids"], answer["finish_reason"]))
            text = answer["message"]["content"]
            messages.append({"role": "assistant", "content": text.strip() if stripped else text})
        await client.post(f"{path}/reward", {"reward": 0.25})

    episode = lab.run(harness)
    assert (episode.error, episode.stop, episode.reward) == ("", StopReason.STOP, 0.25)
    lab.assert_exact(episode)
    for (prompt, ids, finish), fed, gave in zip(told, lab.notes.fed, lab.notes.gave, strict=True):
        assert (prompt, ids) == (fed.prompt.tolist(), gave.tokens.tolist())
        assert (finish == "stop") == (gave.stop is StopReason.STOP)
    # Read as text the episode is the chat, each turn ended once: by the model, or behind a turn that was cut.
    roles = [] if system is None else ["system"]
    roles += [role for _, _, as_tool in turns for role in ("tool" if as_tool else "user", "assistant")]
    [start] = lab.tokenizer.encode("<|im_start|>", special=True)
    assert episode.tokens[~episode.trained].tolist().count(start) == len(roles)
    cut = lab.notes.gave[-1].stop is not StopReason.STOP
    assert episode.tokens.tolist().count(lab.tokenizer.eos) == len(roles) - cut


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    turns=st.lists(
        st.tuples(st.text("0123456789+-= []?", min_size=1, max_size=6), st.none() | st.integers(1, 4)),
        min_size=1,
        max_size=5,
    ),
    as_ids=st.booleans(),
)
def test_the_tokens_of_plain_completions_are_those_fed_and_sampled(letters, tmp_path_factory, seed, turns, as_ids):
    lab = Lab(letters, tmp_path_factory.mktemp("run"), options={}, seed=seed)

    async def harness(client, path):
        known = [] if as_ids else ""
        for said, most in turns:
            known += lab.tokenizer.encode(said) if as_ids else said
            body = {"prompt": known, "return_token_ids": True} | ({"max_tokens": most} if most else {})
            choice = (await client.post(f"{path}/completions", body))["choices"][0]
            known += choice["token_ids"] if as_ids else choice["text"]
        await client.post(f"{path}/reward", {"reward": 1})

    episode = lab.run(harness)
    assert (episode.error, episode.reward) == ("", 1.0)
    lab.assert_exact(episode)


def test_an_episode_through_a_program_is_the_one_played_in_place(lab_of, letters):
    """The same task, seed and engine, once with the environment in the worker and once beyond HTTP."""
    lab = lab_of({"tasks": {"name": "arithmetic"}, "reward": "recipe"}, folder=letters, parts={"correct": 1.0})

    async def main():
        playing = asyncio.create_task(lab.play(seed=7, index=3))
        client, path, invitation = await lab.meet()
        await client.post(f"{path}/completions", {"prompt": invitation["task"]["prompt"]})
        await client.post(f"{path}/end")
        episode = await playing
        await lab.table.close()
        task = make_env("arithmetic", {}).task("train", 3)
        in_place = dataclasses.replace(lab.stage, table=None)
        return episode, await play(task, in_place, Draft(7), key="2.3.1/0", group="2.3.1")

    outside, inside = asyncio.run(main())
    np.testing.assert_array_equal(outside.tokens, inside.tokens)
    np.testing.assert_array_equal(outside.logprobs, inside.logprobs)
    np.testing.assert_array_equal(outside.trained, inside.trained)
    assert (outside.turns, outside.spans, outside.stop) == (inside.turns, inside.spans, inside.stop)
    assert (outside.reward, outside.parts) == (inside.reward, inside.parts)


def test_a_streamed_answer_says_the_same(lab_of):
    lab, said = lab_of(), []

    async def harness(client, path):
        body = {"messages": [user("the weather")], "stream": True}
        said.extend([event async for event in client.stream(f"{path}/chat/completions", body)])
        await client.post(f"{path}/reward", {"reward": 1})

    episode = lab.run(harness)
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in said)
    assert text == lab.tokenizer.transcribe(lab.notes.gave[0].tokens[:-1])
    assert [event["choices"][0]["finish_reason"] for event in said] == [None, None, "stop"]
    assert said[0]["choices"][0]["delta"]["role"] == "assistant"
    lab.assert_exact(episode)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: [user("another question"), *m[1:], user("so?")],
        lambda m: [m[0], {"role": "assistant", "content": "I never said that"}, user("so?")],
        lambda m: m[:1],
        lambda m: [*m[2:], user("so?")],
    ],
    ids=["a message changed", "the model's words changed", "taken back", "forgotten"],
)
def test_an_edited_history_is_refused_and_counted_and_the_episode_goes_on(lab_of, edit):
    lab = lab_of()

    async def harness(client, path):
        messages = [user("the weather")]
        await chat_on(client, path, messages)
        messages.append(user("and then"))
        await chat_on(client, path, messages)
        with pytest.raises(ServerError) as refusal:
            await chat(client, path, edit(messages))
        assert code_of(refusal) == "history_edited"
        messages.append(user("there"))
        await chat_on(client, path, messages)
        await client.post(f"{path}/reward", {"reward": 1})

    episode = lab.run(harness)
    assert episode.error == ""
    lab.assert_exact(episode)
    assert len(lab.notes.fed) == 3
    counts = lab.table.desk.counts
    assert (counts["turns"], counts["branches"], counts["sessions"]) == (3, 0, 1)


def test_a_branch_is_answered_aside_and_never_trained(lab_of):
    lab = lab_of({"edited": "branch"})

    async def harness(client, path):
        messages = [user("the weather")]
        await chat_on(client, path, messages)
        for text in ("sum it up", "sum it up again"):
            assert (await chat(client, path, [user(text)]))["message"]["content"]
        messages.append(user("and then"))
        await chat_on(client, path, messages)
        await client.post(f"{path}/reward", {"reward": 1})

    episode = lab.run(harness)
    assert episode.error == ""
    lab.assert_exact(episode)
    assert lab.table.desk.counts["branches"] == 2
    assert len({request.seed for request in lab.notes.fed}) == 4


def test_the_same_request_again_is_given_the_same_answer_and_sampled_once(lab_of):
    lab = lab_of()

    async def harness(client, path):
        messages = [user("the weather")]
        answers = await asyncio.gather(*(chat(client, path, messages) for _ in range(3)))
        assert len({answer["message"]["content"] for answer in answers}) == 1
        await client.post(f"{path}/reward", {"reward": 1})

    episode = lab.run(harness)
    lab.assert_exact(episode)
    assert len(lab.notes.fed) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role among"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "neither a text"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the model's own"),
        ({"messages": [user("x"), {"role": "assistant", "tool_calls": [{}]}, user("y")]}, "tool calls as objects"),
        ({"messages": [user("x")], "temperature": 0.3}, "rollout.temperature = 1"),
        ({"messages": [user("x")], "top_p": 0.9}, "top_p"),
        ({"messages": [user("x")], "n": 2}, "n = "),
        ({"messages": [user("x")], "stop": ["\n"]}, "stop"),
        ({"messages": [user("x")], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [user("x")], "max_tokens": 0}, "max_tokens = 0"),
        ([], "no JSON object"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_and_costs_nothing(lab_of, body, says):
    lab = lab_of()

    async def harness(client, path):
        with pytest.raises(ServerError, match="gave 400") as refusal:
            await client.post(f"{path}/chat/completions", body)
        assert says in str(refusal.value)
        accepted = {"temperature": 1.0, "top_p": 1, "n": 1, "stop": None, "seed": 3, "user": "me", "tools": []}
        await chat(client, path, [{"role": "user", "content": [{"type": "text", "text": "x"}]}], **accepted)
        await client.post(f"{path}/reward", {"reward": 1})

    assert lab.run(harness).error == ""


@pytest.mark.parametrize("prompt", [[5, -1], [5, 10**6], ["a"], 7, None, [True]])
def test_a_prompt_that_is_none_is_refused(lab_of, prompt):
    lab = lab_of()

    async def harness(client, path):
        with pytest.raises(ServerError, match="gave 400"):
            await client.post(f"{path}/completions", {"prompt": prompt})
        await client.post(f"{path}/completions", {"prompt": [5, 6]})
        await client.post(f"{path}/reward", {"reward": 1})

    assert lab.run(harness).error == ""


@pytest.mark.parametrize("reward", [None, "1", float("inf"), 10**400, True, [1]])
def test_a_reward_that_is_no_number_is_refused(lab_of, reward):
    lab = lab_of()

    async def harness(client, path):
        await chat(client, path, [user("x")])
        with pytest.raises((ServerError, ValueError)):
            await client.post(f"{path}/reward", {"reward": reward})
        await client.post(f"{path}/reward", {"reward": -0.5})
        with pytest.raises(ServerError, match=r"gave 4(01|10)"):
            await client.post(f"{path}/reward", {"reward": 1})

    assert lab.run(harness).reward == -0.5


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_new_tokens": 3}, {"context_tokens": 40}])
def test_a_budget_that_runs_out_is_told_and_the_program_may_still_say_what_it_was_worth(lab_of, limits):
    lab = lab_of(limits=limits)

    async def harness(client, path):
        messages = [user("the weather")]

        async def go_on():
            for _ in range(8):
                await chat_on(client, path, messages)
                messages.append(user("there"))

        with pytest.raises(ServerError) as refusal:
            await go_on()
        assert code_of(refusal) == "budget_spent"
        await client.post(f"{path}/reward", {"reward": 0.5})

    episode = lab.run(harness)
    assert (episode.error, episode.stop, episode.reward) == ("", StopReason.STOP, 0.5)
    lab.assert_exact(episode)


def test_a_program_that_never_learns_costs_its_episode(lab_of):
    lab = lab_of()

    async def harness(client, path):
        for _ in range(40):
            with suppress(ServerError):
                await client.post(f"{path}/completions", {"prompt": [10**6]})

    episode = lab.run(harness)
    assert (episode.stop, "requests of the harness were refused" in episode.error) == (StopReason.ENV_ERROR, True)


@pytest.mark.parametrize("asked", [True, False])
def test_a_program_that_falls_silent_costs_its_episode(lab_of, asked):
    lab = lab_of(deadline_s=0.3)

    async def harness(client, path):
        if asked:
            await chat(client, path, [user("x")])

    episode = lab.run(harness)
    assert episode.stop is StopReason.ENV_ERROR
    assert "asked for nothing within 0.3 s" in episode.error
    assert lab.table.desk.counts["late"] == 1


@pytest.mark.parametrize(
    ("parts", "options", "end", "error"),
    [
        ({"score": 1.0}, {}, "end", "ended without a reward"),
        ({"correct": 1.0}, {"reward": "recipe", "tasks": {"name": "arithmetic"}}, "end", ""),
    ],
)
def test_who_says_what_an_episode_is_worth(lab_of, letters, parts, options, end, error):
    lab = lab_of(options, parts=parts, folder=letters)
    seen = {}

    async def main():
        playing = asyncio.create_task(lab.play(index=4))
        client, path, invitation = await lab.meet()
        seen.update(invitation["task"])
        await client.post(f"{path}/completions", {"prompt": "12+34="})
        await client.post(f"{path}/{end}", {})
        episode = await playing
        await lab.table.close()
        return episode

    episode = asyncio.run(main())
    assert error in episode.error
    assert bool(episode.error) == bool(error)
    if not error:
        assert seen["reference"] == make_env("arithmetic", {}).task("train", 4).reference
        assert episode.parts == {"correct": 0.0}
    assert (seen["facts"]["split"], seen["facts"]["index"]) == ("train", "4")


def test_strangers_get_nothing(lab_of, monkeypatch):
    monkeypatch.setenv("FETCH", "open sesame")
    lab = lab_of({"key_env": "FETCH"}, deadline_s=2.0)

    async def main():
        playing = asyncio.create_task(lab.play())
        with pytest.raises(ServerError, match="gave 401"):
            await lab.meet()
        client, path, invitation = await lab.meet(key="open sesame")
        for place in ("/v1/models", "/s/guess/v1/models", "/s//v1/models", "/s"):
            with pytest.raises(ServerError, match="gave 401"):
                await HttpClient(client.url).get(place)
        with pytest.raises(ServerError, match="gave 404"):
            await client.get(f"{path}/secrets")
        bearer = HttpClient(client.url, key=invitation["api_key"])  # the key alone finds the session, too
        assert (await bearer.get("/v1/models"))["data"][0]["id"] == "policy"
        await bearer.post("/v1/chat/completions", {"messages": [user("x")]})
        for model in ("policy", "policy/", "policy/guess", 7):
            with pytest.raises(ServerError, match="gave 401"):
                await client.post("/v1/chat/completions", {"model": model, "messages": [user("x")]})
        named = {"model": f"policy/{invitation['api_key']}", "messages": [user("x")]}  # and so does the model's name
        assert (await client.post("/v1/chat/completions", named))["choices"]
        await bearer.post("/v1/reward", {"reward": 1})
        episode = await playing
        with pytest.raises(ServerError, match="gave 401"):
            await bearer.post("/v1/chat/completions", {"messages": [user("x")]})
        assert (await client_of(client.url, "open sesame").post("/sessions", {})) == {"base_url": None}
        await lab.table.close()
        return episode

    def client_of(url, key):
        return HttpClient(url, key=key)

    assert asyncio.run(main()).error == ""
    assert not lab.sign.exists()


def test_a_request_that_is_too_large_or_no_json_is_refused(lab_of):
    lab = lab_of({"max_request_bytes": 2048})

    async def raw(client, body, path="/v1/chat/completions", more=b""):
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + more + b"\r\n" + body)
        status = (await reader.readline()).split()[1]
        writer.close()
        return int(status)

    async def harness(client, path):
        assert await raw(client, b"{") == 400
        assert await raw(client, b"[" * 2000) == 400
        assert await raw(client, b"\xff\xfe") == 400
        assert await raw(client, b" " * 4096) == 413
        assert await raw(client, b"{}", path="http://[") == 400
        assert await raw(client, b"{}", more=b"X-Name: caf\xe9\r\n") == 401
        await chat(client, path, [user("x")])
        await client.post(f"{path}/reward", {"reward": 1})

    assert lab.run(harness).error == ""


PROGRAM = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=20).read())
"""


def program(tmp_path, body):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + textwrap.dedent(body))
    return [sys.executable, "-S", str(path)]


def test_a_program_is_started_for_an_episode_and_plays_it(lab_of, tmp_path):
    command = program(
        tmp_path,
        """
        messages = [{"role": "user", "content": task["key"]}]
        for turn in range(3):
            answer = post("/chat/completions", {"messages": messages})["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": f"the other {turn}"}]
        post("/reward", {"reward": 0.75})
        """,
    )
    lab = lab_of({"command": command}, deadline_s=20.0)
    episode = lab.run()
    assert (episode.error, episode.reward, len(lab.notes.fed)) == ("", 0.75, 3)
    lab.assert_exact(episode)
    assert "train/0" in lab.tokenizer.decode(episode.tokens)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("sys.exit('out of luck')", "ended with exit code 1: out of luck"),
        (
            "post('/chat/completions', {'messages': [{'role': 'user', 'content': 'x'}]}); os.kill(os.getpid(), 9)",
            "exit code -9",
        ),
        ("pass", "ended before the model said anything"),
        ("import time; time.sleep(60)", "asked for nothing within 1.5 s"),
        ("post('/chat/completions', {'messages': [{'role': 'user', 'content': 'x'}]})", "ended without a reward"),
    ],
    ids=["fails", "killed", "does nothing", "hangs", "forgets"],
)
def test_a_program_that_dies_costs_its_episode_with_its_last_words(lab_of, tmp_path, body, says):
    lab = lab_of({"command": program(tmp_path, body)}, deadline_s=1.5)
    episode = lab.run()
    assert (episode.stop, episode.failed) == (StopReason.ENV_ERROR, True)
    assert says in episode.error


def test_a_program_that_is_not_there_is_named(lab_of):
    assert "'/no/such/program' does not start" in lab_of({"command": ["/no/such/program"]}).run().error


def ends(pid):
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:  # gone already
        return True
    try:
        return bool(select.select([held], [], [], 10)[0])
    finally:
        os.close(held)


def test_a_program_ends_with_an_episode_that_is_cancelled_while_it_may_still_leave(lab_of, tmp_path):
    told = tmp_path / "told"
    os.mkfifo(told)
    command = program(
        tmp_path,
        f"""
        import time
        post("/chat/completions", {{"messages": [{{"role": "user", "content": "x"}}]}})
        post("/reward", {{"reward": 1}})
        open({str(told)!r}, "w").write(str(os.getpid()))
        time.sleep(60)
        """,
    )
    lab = lab_of({"command": command}, deadline_s=20.0)

    async def main():
        playing = asyncio.create_task(lab.play())
        async with asyncio.timeout(30):
            pid = int(await asyncio.to_thread(told.read_text))  # its reward is in: it has a moment to end by itself
        playing.cancel()
        await asyncio.wait([playing], timeout=10)
        await lab.table.close()
        return playing.cancelled(), pid

    cancelled, pid = asyncio.run(main())
    assert cancelled
    assert ends(pid), "the program lives on"


def test_children_of_a_program_end_with_the_episode(lab_of, tmp_path):
    command = program(
        tmp_path,
        f"""
        import subprocess
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        post("/chat/completions", {{"messages": [{{"role": "user", "content": "x"}}]}})
        post("/reward", {{"reward": 1}})
        """,
    )
    assert lab_of({"command": command}, deadline_s=20.0).run().error == ""
    assert ends(int((tmp_path / "pid").read_text())), "the child lives on"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reward": "recipe"}, "needs tasks"),
        ({"tasks": {"nam": "arithmetic"}}, "write { name = 'arithmetic'"),
        ({"tasks": {"name": "arithmetik"}}, "did you mean 'arithmetic'"),
        ({"host": "0.0.0.0"}, "name a key for them in key_env"),
        ({"command": ["a\0b"]}, "no word a zero byte"),
        ({"comand": ["x"]}, "did you mean 'command'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ConfigError) as refusal:
        make_env("harness", options)
    assert says in str(refusal.value)


def test_a_key_that_is_not_set_is_named(lab_of, monkeypatch):
    monkeypatch.delenv("FETCH", raising=False)
    with pytest.raises(ConfigError, match="names FETCH, which is not set"):
        lab_of({"key_env": "FETCH"})


def test_the_client_of_openai_plays_an_episode(lab_of):
    openai = pytest.importorskip("openai")
    lab = lab_of()

    async def harness(client, path):
        async with openai.AsyncOpenAI(base_url=client.url + path, api_key="any", max_retries=0) as other:
            messages = [user("the weather")]
            answer = await other.chat.completions.create(model="policy", messages=messages)
            messages += [answer.choices[0].message.model_dump(), user("and then")]
            parts = await other.chat.completions.create(model="policy", messages=messages, stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in parts])
            assert text == lab.tokenizer.transcribe(lab.notes.gave[1].tokens[:-1])
            messages += [{"role": "assistant", "content": text}, user("there")]
            await other.chat.completions.create(model="policy", messages=messages, temperature=1.0)
            with pytest.raises(openai.BadRequestError, match="not what was said before"):
                await other.chat.completions.create(
                    model="policy", messages=[user("x"), *messages[1:], user("y"), user("z")]
                )
            assert [model.id async for model in other.models.list()] == ["policy"]
        await client.post(f"{path}/reward", {"reward": 1})

    episode = lab.run(harness)
    assert episode.error == ""
    lab.assert_exact(episode)


def test_an_episode_that_was_begun_elsewhere_is_not_sampled_twice(lab_of):
    """A program that says the same again is answered from what another worker sampled, and goes on from there."""
    turns = ["the weather", "and then", "there"]

    async def harness(client, path):
        messages = []
        for said in turns:
            messages.append(user(said))
            await chat_on(client, path, messages)
        await client.post(f"{path}/reward", {"reward": 1})

    whole = lab_of().run(harness)
    first = whole.turns[:3]  # prompt, the model's first turn, what it was told next
    left = msgspec.structs.replace(
        whole,
        tokens=whole.tokens[: first[-1].end],
        trained=whole.trained[: first[-1].end],
        logprobs=whole.logprobs[: first[-1].end],
        spans=whole.spans[:1],
        turns=first,
    )
    lab = lab_of()
    draft = Draft(1, left)
    again = lab.run(harness, draft=draft)
    np.testing.assert_array_equal(again.tokens, whole.tokens)
    assert len(lab.notes.fed) == 2
    assert draft.recalled == first[1].end - first[1].start
