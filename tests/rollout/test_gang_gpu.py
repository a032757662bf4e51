"""An engine over two GPUs gives what the engine on one gives, refreshes included."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from contraflow.model.decoder import new_decoder
from contraflow.types import Version
from tests.rollout.gangs import Gang
from tests.rollout.test_gang import ROOMY, TIGHT, spec_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
V2 = Version(1, 2)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    ranks = Gang()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("parallel", [{"dp": 2, "ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("keys", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_tokens_and_logprobs_are_those_of_one_gpu(
    native: Any, gang: Gang, parallel: dict[str, Any], keys: dict[str, Any]
) -> None:
    async def body() -> None:
        config = native.tiny()
        requests = native.crowd(16, want_routes=True)
        spec = spec_of(config, parallel, device="cuda", **keys)
        alone = native.engine_of(new_decoder(config, seed=1, std=0.2).to("cuda:0"), routes=True, **keys)
        engine = gang.engine(spec)
        for version, seed in ((None, 1), (V2, 2)):
            if version is not None:
                tensors, probe = native.release(new_decoder(config, seed=seed, std=0.2))
                await alone.swap(version, tensors, probe)
                await engine.swap(version, tensors, probe)
            wanted, got = await native.answers(alone, requests), await native.answers(engine, requests)
            for mine, theirs in zip(got, wanted, strict=True):
                assert mine.tokens.tolist() == theirs.tokens.tolist()
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4, rtol=0)
                np.testing.assert_array_equal(mine.routes, theirs.routes)
        await engine.close()
        await alone.close()

    native.run(body)
