"""A refresh ends with the new version proven and served, or with the old one served as before; never in between."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch

from contraflow.config import Engine as EngineSection
from contraflow.config import Weights
from contraflow.errors import CarrierError, ConfigError, DeadlineExceeded
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.refresh import ChunkFetcher, Refresher, RefreshReport
from contraflow.rollout.scripted import ScriptedEngine
from contraflow.types import Completion, Manifest, Probe, Request, Version
from contraflow.weights import open_carrier
from contraflow.weights.carrier import Carrier
from contraflow.weights.manifest import expect
from contraflow.weights.memory import MemoryCarrier
from contraflow.weights.probe import make_probe, probe_prompts
from contraflow.weights.publish import Publisher

CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab=32,
    dim=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    top_k=2,
    expert_ffn=16,
    renormalise=True,
    context=512,
)
PROMPTS = probe_prompts(CONFIG.vocab, prompts=2, tokens=8, seed=0)
WAIT_S = 30.0


def decoder_of(seed: int) -> Decoder:
    return new_decoder(CONFIG, seed=seed, std=0.2)


@pytest.fixture(params=["memory", "blob"])
def carriers(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Carrier]:
    return lambda: open_carrier(Weights(carrier=request.param), tmp_path)


@pytest.fixture
def memory(tmp_path: Path) -> Callable[[], Carrier]:
    return lambda: open_carrier(Weights(carrier="memory"), tmp_path)


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[Publisher]:
    """Publishes on whichever carrier the test reads from."""
    opened = request.getfixturevalue("carriers" if "carriers" in request.fixturenames else "memory")
    with closing(Publisher(opened(), keep=4)) as publisher:
        yield publisher


def publish(publisher: Publisher, decoder: Decoder, n: int, probed: Decoder | None = None) -> Manifest:
    return publisher.publish(
        decoder.state_dict(),
        version=Version(1, n),
        model=CONFIG.digest(),
        probe=make_probe(probed or decoder, PROMPTS, 1e-4),
        chunk_bytes=4096,
    )


def native(decoder: Decoder, stepping: Literal["thread", "inline"] = "thread", n: int | None = None) -> NativeEngine:
    section = EngineSection(block_tokens=4, kv_tokens=2048)
    return NativeEngine(
        decoder,
        section,
        clock=time.perf_counter,
        stepping=stepping,
        version=None if n is None else Version(1, n),
    )


def scripted(n: int | None = None, prove: Callable[[Mapping[str, Any], Probe], None] | None = None) -> ScriptedEngine:
    version = None if n is None else Version(1, n)
    return ScriptedEngine(lambda _: [1] * 50, vocab=32, clock=time.perf_counter, version=version, prove=prove)


def refresher_of(engine: Any, carrier: Carrier, **keys: Any) -> Refresher:
    fetcher = ChunkFetcher(carrier, keys.pop("fetching", "thread"))
    return Refresher(engine, fetcher, **{"clock": time.perf_counter, **keys})


def ask(name: str, new: int = 12, seed: int = 5) -> Request:
    return Request(id=name, prompt=np.array([3, 1, 4, 1], np.int32), seed=seed, max_new_tokens=new)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(body(), WAIT_S)

    asyncio.run(bounded())


def assert_same(found: Completion, wanted: Completion) -> None:
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.logprobs, wanted.logprobs)


async def answer_of(seed: int) -> Completion:
    """What an engine that never held other weights than those of `seed` says."""
    engine = native(decoder_of(seed), "inline", n=9)
    answer = await engine.generate(ask("alone"))
    await engine.close()
    return answer


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_after_a_refresh_the_engine_answers_as_one_that_never_held_other_weights(
    publisher: Publisher, carriers: Callable[[], Carrier], stepping: Literal["thread", "inline"]
) -> None:
    async def body() -> None:
        decoder = decoder_of(0)
        engine = native(decoder, stepping)
        expected = expect(CONFIG.digest(), decoder.state_dict())
        refresher = refresher_of(engine, carriers(), expected=expected, fetching=stepping)
        for n in (1, 2, 3):
            manifest = publish(publisher, decoder_of(n), n)
            report = await refresher.refresh(manifest)
            assert report == RefreshReport(
                version=Version(1, n),
                bytes=sum(t.nbytes for t in decoder.state_dict().values()) + padding(manifest),
                moved=report.bytes,
                fetch_s=report.fetch_s,
                stall_s=report.stall_s,
                served=True,
            )
            assert report.fetch_s > 0
            assert report.stall_s > 0
            answer = await engine.generate(ask(f"after {n}"))
            assert [span.version for span in answer.spans] == [Version(1, n)]
            assert_same(answer, await answer_of(n))
        refresher.close()
        await engine.close()

    run(body)


def padding(manifest: Manifest) -> int:
    ends = [entry.offset + entry.nbytes for entry in manifest.tensors]
    starts = [entry.offset for entry in manifest.tensors]
    return sum(start - end for end, start in zip(ends[:-1], starts[1:], strict=True))


def test_sequences_in_flight_go_on_over_a_refresh_and_say_which_version_sampled_what(
    publisher: Publisher, carriers: Callable[[], Carrier]
) -> None:
    async def body() -> None:
        engine = native(decoder_of(0), n=0)
        refresher = refresher_of(engine, carriers())
        flying = [asyncio.ensure_future(engine.generate(ask(f"q{i}", new=200, seed=i))) for i in range(8)]
        await engine.generate(ask("begun", new=5))
        assert (await refresher.refresh(publish(publisher, decoder_of(1), 1))).served
        answers = await asyncio.gather(*flying)
        assert all(len(answer.tokens) == 200 for answer in answers)
        assert {span.version.n for answer in answers for span in answer.spans} == {0, 1}
        await engine.close()

    run(body)


def test_altered_bytes_are_refused_and_the_old_version_answers_as_before(
    publisher: Publisher, memory: Callable[[], Carrier]
) -> None:
    async def body() -> None:
        engine = native(decoder_of(0))
        refresher = refresher_of(engine, memory())
        await refresher.refresh(publish(publisher, decoder_of(1), 1))
        before = await engine.generate(ask("before"))
        manifest = publish(publisher, decoder_of(2), 2)
        flip_a_bit(Path(manifest.location), at=4096 * 2 + 7)
        with pytest.raises(CarrierError, match=r"version 1\.2, chunk 2 "):
            await refresher.refresh(manifest)
        assert engine.version == Version(1, 1)
        assert_same(await engine.generate(ask("after")), before)
        assert (await refresher.refresh(publish(publisher, decoder_of(3), 3))).served
        await engine.close()

    run(body)


def flip_a_bit(path: Path, *, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("stepping", ["thread", "inline"])
def test_right_bytes_of_wrong_weights_fail_the_proof_and_are_rolled_back_even_when_the_old_ones_are_retired(
    publisher: Publisher, carriers: Callable[[], Carrier], stepping: Literal["thread", "inline"]
) -> None:
    async def body() -> None:
        engine, carrier = native(decoder_of(0), stepping), carriers()
        refresher = refresher_of(engine, carrier, fetching=stepping)
        await refresher.refresh(publish(publisher, decoder_of(1), 1))
        before = await engine.generate(ask("before"))
        carrier.retire(Version(1, 1))
        for n in (2, 3):
            wrong = publish(publisher, decoder_of(7), n, probed=decoder_of(8))
            with pytest.raises(
                CarrierError, match=rf"version 1\.{n} is refused and 1\.1 still served: the probe failed: largest"
            ):
                await refresher.refresh(wrong)
            assert engine.version == Version(1, 1)
            assert_same(await engine.generate(ask("after")), before)
        assert (await refresher.refresh(publish(publisher, decoder_of(4), 4))).served
        assert_same(await engine.generate(ask("then")), await answer_of(4))
        await engine.close()

    run(body)


def test_a_first_version_that_fails_its_proof_leaves_the_engine_serving_nothing(
    publisher: Publisher, memory: Callable[[], Carrier]
) -> None:
    async def body() -> None:
        engine = native(decoder_of(0))
        wrong = publish(publisher, decoder_of(7), 1, probed=decoder_of(8))
        with pytest.raises(CarrierError, match="refused and None still served"):
            await refresher_of(engine, memory()).refresh(wrong)
        assert engine.version is None
        await engine.close()

    run(body)


@pytest.mark.parametrize("fault", ["model", "missing", "extra", "shape"])
def test_a_version_that_does_not_fit_the_engine_is_refused_before_it_is_fetched(
    publisher: Publisher, memory: Callable[[], Carrier], fault: str
) -> None:
    async def body() -> None:
        decoder = decoder_of(0)
        tensors = dict(decoder_of(1).state_dict())
        name = next(iter(tensors))
        if fault == "missing":
            del tensors[name]
        elif fault == "extra":
            tensors["layers.99.more"] = torch.zeros(3)
        elif fault == "shape":
            tensors[name] = tensors[name].reshape(-1)
        manifest = publisher.publish(
            tensors,
            version=Version(1, 1),
            model="another" if fault == "model" else CONFIG.digest(),
            probe=make_probe(decoder, PROMPTS, 1e-4),
            chunk_bytes=4096,
        )
        engine = native(decoder, n=0)
        before = await engine.generate(ask("before"))
        refresher = refresher_of(engine, memory(), expected=expect(CONFIG.digest(), decoder.state_dict()))
        with pytest.raises(CarrierError, match=r"version 1\.1.*the old one is kept"):
            await refresher.refresh(manifest)
        assert engine.version == Version(1, 0)
        assert engine.report().longest_stall_s == 0
        assert_same(await engine.generate(ask("after")), before)
        await engine.close()

    run(body)


def test_a_repeated_manifest_is_a_no_op_and_a_stale_one_is_skipped(
    publisher: Publisher, memory: Callable[[], Carrier]
) -> None:
    async def body() -> None:
        engine = scripted()
        refresher = refresher_of(engine, memory())
        first, second = (publish(publisher, decoder_of(n), n) for n in (1, 2))
        assert (await refresher.refresh(second)).served
        again = await refresher.refresh(second)
        assert (again.served, again.bytes, again.reason) == (True, 0, "repeated: it is served already")
        stale = await refresher.refresh(first)
        assert (stale.served, stale.reason) == (False, "stale: version 1.2 is served")
        assert engine.version == Version(1, 2)
        assert engine.report().swaps == 1

    run(body)


def test_a_retired_version_is_skipped_and_said_so(publisher: Publisher, memory: Callable[[], Carrier]) -> None:
    async def body() -> None:
        engine, carrier = scripted(n=0), memory()
        manifest = publish(publisher, decoder_of(1), 1)
        carrier.retire(manifest.version)
        report = await refresher_of(engine, carrier).refresh(manifest)
        assert not report.served
        assert "retired" in report.reason
        assert engine.version == Version(1, 0)

    run(body)


class Gate(MemoryCarrier):
    """A memory carrier on a slow day: `open` waits at the gate. A real carrier in everything else."""

    def __init__(self, inner: MemoryCarrier) -> None:
        super().__init__(inner.folder.parent, inner.folder.name.removeprefix("contraflow-"))
        self.waiting = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.opened: list[Version] = []

    def open(self, manifest: Manifest):  # type: ignore[no-untyped-def]
        self.opened.append(manifest.version)
        self.waiting.release()
        assert self.gate.acquire(timeout=WAIT_S)
        return super().open(manifest)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.waiting.acquire, timeout=WAIT_S)


@pytest.fixture
def gate(memory: Callable[[], Carrier]) -> Gate:
    carrier = memory()
    assert isinstance(carrier, MemoryCarrier)
    return Gate(carrier)


def test_of_racing_refreshes_the_newest_wins_and_the_others_say_that_they_were_overtaken(
    publisher: Publisher, gate: Gate
) -> None:
    async def body() -> None:
        engine = scripted(n=0)
        refresher = refresher_of(engine, gate)
        manifests = [publish(publisher, decoder_of(n), n) for n in (1, 2, 3, 4)]
        loading = asyncio.ensure_future(refresher.refresh(manifests[0]))
        await gate.reached()
        others = [asyncio.ensure_future(refresher.refresh(manifests[i])) for i in (2, 3, 1, 3)]
        await asyncio.sleep(0)
        for _ in range(2):
            gate.gate.release()
        reports = await asyncio.gather(loading, *others)
        assert [(report.version.n, report.served) for report in reports] == [
            (1, False),
            (3, False),
            (4, True),
            (2, False),
            (4, True),
        ]
        assert reports[0].reason == reports[1].reason == "overtaken: version 1.4 was asked for"
        assert reports[0].bytes > 0
        assert reports[4].reason == "repeated: it is served already"
        assert gate.opened == [Version(1, 1), Version(1, 4)]
        assert engine.version == Version(1, 4)
        assert engine.report().swaps == 1

    run(body)


def test_the_engine_goes_on_while_a_version_is_being_fetched(publisher: Publisher, gate: Gate) -> None:
    async def body() -> None:
        engine = native(decoder_of(0), n=0)
        refresher = refresher_of(engine, gate)
        loading = asyncio.ensure_future(refresher.refresh(publish(publisher, decoder_of(1), 1)))
        await gate.reached()
        answer = await engine.generate(ask("meanwhile"))
        assert [span.version.n for span in answer.spans] == [0]
        assert not loading.done()
        gate.gate.release()
        assert (await loading).served
        await engine.close()

    run(body)


def test_a_carrier_that_hangs_ends_at_the_deadline_and_says_what_was_waited_for(
    publisher: Publisher, gate: Gate
) -> None:
    async def body() -> None:
        engine = scripted(n=0)
        refresher = refresher_of(engine, gate, deadline_s=0.1)
        first, second = (publish(publisher, decoder_of(n), n) for n in (1, 2))
        hung = asyncio.ensure_future(refresher.refresh(first))
        await gate.reached()
        with pytest.raises(
            DeadlineExceeded, match=r"refresh to version 1\.1 waited 0\.1 s for the memory carrier to give version 1\.1"
        ):
            await hung
        assert engine.version == Version(1, 0)
        for _ in range(2):
            gate.gate.release()
        assert (await refresher.refresh(second)).served

    run(body)


def test_a_refresh_cancelled_in_mid_swap_leaves_an_engine_that_can_be_refreshed_and_rolled_back(
    publisher: Publisher, memory: Callable[[], Carrier]
) -> None:
    async def body() -> None:
        engine = native(decoder_of(0))
        refresher = refresher_of(engine, memory())
        await refresher.refresh(publish(publisher, decoder_of(1), 1))
        swapping = asyncio.ensure_future(refresher.refresh(publish(publisher, decoder_of(2), 2)))
        await asyncio.sleep(0.002)
        swapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swapping
        assert engine.version is not None
        ended_with = engine.version.n
        with pytest.raises(CarrierError, match="the probe failed"):
            await refresher.refresh(publish(publisher, decoder_of(7), 3, probed=decoder_of(8)))
        assert engine.version == Version(1, ended_with)
        assert_same(await engine.generate(ask("after")), await answer_of(ended_with))
        await engine.close()

    run(body)


def maps_of(carrier: Carrier) -> int:
    """How many versions of this carrier's run the process has mapped."""
    assert isinstance(carrier, MemoryCarrier)
    return sum(carrier.folder.name in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the maps of this process")
def test_only_the_version_that_is_served_stays_mapped(publisher: Publisher, memory: Callable[[], Carrier]) -> None:
    async def body() -> None:
        engine, carrier = native(decoder_of(0), "inline"), memory()
        refresher = refresher_of(engine, carrier)
        for n in (1, 2, 3):
            await refresher.refresh(publish(publisher, decoder_of(n), n))
            assert maps_of(carrier) == 1
        with pytest.raises(CarrierError, match="the probe failed"):
            await refresher.refresh(publish(publisher, decoder_of(7), 4, probed=decoder_of(8)))
        gc.collect()  # the traceback of the refusal, and what it refers to
        assert maps_of(carrier) == 1
        refresher.close()
        await engine.close()

    run(body)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the maps of this process")
def test_what_a_swap_may_have_to_roll_back_to_is_mapped_until_the_swap_has_ended(
    publisher: Publisher, memory: Callable[[], Carrier]
) -> None:
    carrier, seen = memory(), []

    def prove(tensors: Mapping[str, Any], probe: Probe) -> None:
        seen.append(maps_of(carrier))
        if len(seen) == 3:
            raise CarrierError("not this one")

    async def body() -> None:
        refresher = refresher_of(scripted(prove=prove), carrier)
        for n in (1, 2):
            await refresher.refresh(publish(publisher, decoder_of(n), n))
        with pytest.raises(CarrierError, match="not this one"):
            await refresher.refresh(publish(publisher, decoder_of(3), 3))
        await refresher.refresh(publish(publisher, decoder_of(4), 4))
        assert seen == [1, 2, 2, 2]
        assert maps_of(carrier) == 1

    run(body)


def test_a_deadline_of_nothing_is_refused(memory: Callable[[], Carrier]) -> None:
    with pytest.raises(ConfigError, match="deadline_s = 0"):
        refresher_of(scripted(), memory(), deadline_s=0)


def test_a_precision_in_which_engine_and_trainer_differ_is_declared_and_said(
    publisher: Publisher, memory: Callable[[], Carrier]
) -> None:
    async def body() -> None:
        said = []
        for n, (trainer, engine) in enumerate([("same", "same"), ("fp8", "fp8"), ("same", "fp8")]):
            manifest = msgspec.structs.replace(publish(publisher, decoder_of(n), n + 1), wire=trainer)
            report = await refresher_of(scripted(), memory(), wire=engine).refresh(manifest)
            assert report.served
            said.append(report.differs)
        assert said == ["", "", "tokens travel to experts as 'fp8' in the engine, as 'same' in the trainer"]

    run(body)
