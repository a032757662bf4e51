"""What all tests share: laws judged without a stopwatch, one torch thread, a tiny random model with its tokenizer."""

from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.tokenizer import Tokenizer, build_char_tokenizer
from tests import seaweed
from tests.processes import forking
from tests.ray_head import Head

# Hypothesis judges laws, not speed: test machines are shared and slow at times.
settings.register_profile("contraflow", deadline=None)
settings.load_profile("contraflow")


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Head]:
    """A head of Ray that tests share; none is started where no test asks."""
    head = Head()
    try:
        yield head.until_ready()
    finally:
        head.close()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """The runtime's workers are forked from the server that all tests share, and not from one of its own wishes."""
    forking()
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3-MoE kind, 2 layers, width 32, 4 experts top-2, random weights."""
    folder = tmp_path_factory.mktemp("tiny-moe")
    build_char_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    config = ModelConfig(
        family="qwen3_moe",
        vocab=tokenizer.size,
        dim=32,
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=16,
        experts=4,
        top_k=2,
        expert_ffn=32,
        renormalise=True,
        context=128,
        eos=(tokenizer.eos,),
    )
    save_folder(new_decoder(config, seed=7), folder)
    return folder


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a real S3 on this machine; tests that need it are marked `s3`."""
    binary = seaweed.weed()
    if binary is None:
        pytest.skip("needs SeaweedFS: run `make test-store`, or let CONTRAFLOW_WEED name its binary")
    with seaweed.served(binary, tmp_path_factory.mktemp("seaweed")) as port, pytest.MonkeyPatch.context() as patch:
        for name, value in seaweed.environment(port).items():
            patch.setenv(name, value)
        seaweed.wait_for_store()
        yield port


@pytest.fixture
def bucket(s3_port: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place on that S3 for one test alone."""
    for name, value in seaweed.environment(s3_port).items():
        monkeypatch.setenv(name, value)
    return f"s3://{seaweed.BUCKET}/{abs(hash(request.node.nodeid)):x}"
