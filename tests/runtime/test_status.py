"""A worker's page can be read by anybody, at any time, and says why an answer may be late."""

from pathlib import Path

from contraflow.runtime.status import STALE_S, StatusPage, read_status


def test_a_page_tells_what_was_last_written(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "page", 10.0)
    page.running("step, report x2")
    page.beat(11.0)
    page.tick(10.5)
    status = read_status(tmp_path / "page")
    assert status is not None
    assert (status.process_s, status.loop_s, status.running) == (11.0, 10.5, "step, report x2")
    page.running("")
    assert (read_status(tmp_path / "page") or status).running == ""


def test_text_longer_than_the_page_is_cut(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "page", 0.0)
    page.running("é" * 5000)
    status = read_status(tmp_path / "page")
    assert status is not None
    assert status.running.startswith("é" * 2000)


def test_a_page_that_is_missing_or_not_whole_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path / "page") is None
    (tmp_path / "page").write_bytes(b"short")
    assert read_status(tmp_path / "page") is None


def test_trouble_tells_a_blocked_loop_from_a_process_that_does_not_move(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "page", 0.0)
    page.running("step")

    def trouble(now: float) -> str:
        status = read_status(tmp_path / "page")
        assert status is not None
        return status.trouble(now)

    assert trouble(STALE_S) == ""
    page.beat(30.0)
    assert trouble(30.0) == "its event loop has been blocked for 30 s; running: step"
    assert trouble(40.0) == "its process has not moved for 10 s"
    page.tick(30.0)
    assert trouble(31.0) == ""
