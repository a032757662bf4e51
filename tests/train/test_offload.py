"""What the trainer keeps on the host between steps changes nothing that it computes."""

import msgspec
import pytest
import torch

from contraflow.train.worker import Trainer
from tests.train.test_worker import TRAIN, bench, equal, inline  # noqa: F401 - bench is a fixture


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_versions_and_cuts_are_the_same_bit_for_bit(bench, offload):  # noqa: F811
    async def body(runtime):
        found = {}
        for name in ("none", offload):
            here = await bench(runtime, name)
            await here.start(f"trainer-{name}", train=TRAIN.model_copy(update={"offload": name}))
            await here.trainer.call(5, Trainer.publish, 0)
            reports = [await here.step(step) for step in range(3)]
            cut = await here.save(3)
            told = await here.trainer.call(5, Trainer.report)
            found[name] = [here.weights(report.manifest) for report in reports], cut, told
        for plain, moved in zip(found["none"][0], found[offload][0], strict=True):
            assert equal(plain, moved)
        assert found["none"][2].moved_bytes == 0
        parameters = sum(t.numel() for t in found["none"][0][0].values())
        # Moments come home for the second and third step and for the cut, and go after each step and the cut.
        moments = 2 * 4 * parameters * (3 + 4)
        weights = 4 * parameters * (4 + 5)
        assert found[offload][2].moved_bytes == moments + (weights if offload == "all" else 0)
        assert {"offload", "reload"} <= found[offload][2].seconds.keys()

    inline(body)


def test_a_refused_step_leaves_the_state_whole(bench):  # noqa: F811
    async def body(runtime):
        here = await bench(runtime)
        await here.start(train=TRAIN.model_copy(update={"offload": "all"}))
        await here.trainer.call(5, Trainer.publish, 0)
        first = await here.step(0)

        def spoil(episode):
            return msgspec.structs.replace(episode, logprobs=episode.logprobs * float("nan"))

        second = await here.step(1, spoil=spoil)
        assert not second.applied
        assert equal(here.weights(first.manifest), here.weights(second.manifest))
        third = await here.step(2)
        assert third.applied
        assert all(torch.isfinite(t).all() for t in here.weights(third.manifest).values())

    inline(body)
