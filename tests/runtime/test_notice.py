"""The metadata service is asked as EC2 wants it, and believed only when it answers as EC2 does."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from contraflow.errors import NoticeError
from contraflow.runtime.notice import Metadata, first_notice
from tests.imds import ACTION, REBALANCE, SOON, Imds, imds


@pytest.fixture
def service() -> Iterator[Imds]:
    with imds() as running:
        yield running


def ask(metadata: Metadata) -> str:
    return asyncio.run(metadata.ask())


def test_a_machine_that_stays_is_asked_about_with_one_token_for_all_questions(service: Imds) -> None:
    metadata = Metadata(service.url, deadline_s=5.0)
    assert [ask(metadata) for _ in range(3)] == ["", "", ""]
    assert service.asked == ["PUT /latest/api/token", *[f"GET {ACTION}", f"GET {REBALANCE}"] * 3]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (ACTION, SOON, "instance-action: action terminate, time 2030-01-01T08:22:00Z"),
        (ACTION, {"action": "stop"}, "instance-action: action stop"),
        (REBALANCE, {"noticeTime": "2030-01-01T08:22:00Z"}, "rebalance: noticeTime 2030-01-01T08:22:00Z"),
    ],
)
def test_what_it_says_of_the_machines_end_is_told(service: Imds, path: str, body: object, said: str) -> None:
    service.say(path, body)
    assert ask(Metadata(f"{service.url}/", deadline_s=5.0)) == said


def test_a_token_that_has_run_out_is_asked_for_again(service: Imds) -> None:
    metadata = Metadata(service.url, deadline_s=5.0)
    ask(metadata)
    service.valid = set()
    service.say(ACTION, SOON)
    assert "terminate" in ask(metadata)
    assert service.tokens == 2


@pytest.mark.parametrize("body", [b"<html>log in here</html>", b"", b"[]", b'{"state": "fine"}', b"\xff" * 9999])
def test_a_page_that_is_no_notice_ends_nothing(service: Imds, body: bytes) -> None:
    service.say(ACTION, body)
    with pytest.raises(NoticeError, match="an object with 'action' is due"):
        ask(Metadata(service.url, deadline_s=5.0))


@pytest.mark.parametrize("status", [500, 403, 302])
def test_other_answers_are_an_error_that_names_service_and_status(service: Imds, status: int) -> None:
    service.say(REBALANCE, b"", status)
    with pytest.raises(NoticeError, match=rf"127\.0\.0\.1:\d+ answered {REBALANCE} with status {status}"):
        ask(Metadata(service.url, deadline_s=5.0))


def test_a_service_that_gives_no_token_or_takes_none_is_an_error(service: Imds) -> None:
    service.token_status = 403
    with pytest.raises(NoticeError, match="gave no token: status 403"):
        ask(Metadata(service.url, deadline_s=5.0))
    service.say(ACTION, b"", 401)
    service.token_status = 200
    with pytest.raises(NoticeError, match="with status 401"):
        ask(Metadata(service.url, deadline_s=5.0))


def test_a_late_answer_is_none(service: Imds) -> None:
    service.slow_s = 0.5
    with pytest.raises(NoticeError, match=r"did not answer within 0\.1 s|cannot be asked: timed out"):
        ask(Metadata(service.url, deadline_s=0.1))


def test_nobody_there_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(NoticeError, match=r"cannot be asked: .*refused"):
            ask(Metadata(f"http://127.0.0.1:{taken.getsockname()[1]}", deadline_s=5.0))


def test_it_is_asked_until_it_says_something_and_each_trouble_is_told_once(service: Imds) -> None:
    troubles: list[str] = []

    async def main() -> str:
        service.say(ACTION, b"", 500)
        waiting = asyncio.ensure_future(first_notice(Metadata(service.url, deadline_s=5.0), 0.01, troubles.append))
        assert await asyncio.to_thread(service.third.wait, 20)
        service.say(ACTION, SOON)
        return await asyncio.wait_for(waiting, 20)

    assert "terminate" in asyncio.run(main())
    assert len(troubles) == 1
    assert "status 500" in troubles[0]
