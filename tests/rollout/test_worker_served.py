"""The rollout worker with an engine that another program runs: the twin of a vLLM server, on a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from contraflow import config
from contraflow.model.folder import load_folder
from contraflow.rollout.vllm_twin import VllmTwin
from contraflow.weights.probe import probe_logprobs
from tests.rollout.test_worker_native import model, play, routes_of

__all__ = ["model"]  # a fixture


@contextmanager
def twin(folder: Path, socket: Path) -> Iterator[str]:
    """A server in another thread; its address."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    server = VllmTwin(folder, context_tokens=96, routes=True)

    async def begin() -> None:
        await server.open(socket)
        ready.set()

    def serve() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield f"unix:{socket}"
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_a_worker_plays_on_a_server_and_hands_over_what_the_model_says(tmp_path: Path, model: Path) -> None:
    with twin(model, tmp_path / "s") as url:
        engine = config.Engine(kind="vllm", context_tokens=96, routes=True, server=config.Server(urls=(url,)))
        groups, look, report = play(tmp_path, model, kind="inline", groups=2, engine=engine)
    decoder = load_folder(model)
    episodes = [episode for group in groups for episode in group.episodes]
    assert len(episodes) == 8
    for episode in episodes:
        assert not episode.failed
        (own,) = probe_logprobs(decoder, [episode.tokens])
        assert np.abs(episode.logprobs[1:] - own)[episode.trained[1:]].max() < 1e-4
        assert (episode.routes == routes_of(decoder, episode.tokens)).mean() > 0.999
    assert (look.count, look.failed) == (8, 0)
    assert (report.engine.swaps, report.engine.running, report.engine.faults) == (1, 0, {})
