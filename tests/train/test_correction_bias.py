"""A router's correction bias: training leaves it alone, a cut keeps it, and a refresh carries it to an engine."""

import asyncio
import time

import numpy as np
import pytest
import torch

from contraflow.config import Engine, Train, Weights
from contraflow.errors import CarrierError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder, save_folder
from contraflow.model.router import RouterTape
from contraflow.rollout.native import NativeEngine
from contraflow.rollout.swap import LiveWeights
from contraflow.telemetry import Account
from contraflow.train.batcher import pack
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Request, Routes, Sample, Version
from contraflow.weights import open_carrier
from contraflow.weights.fetch import fetch
from contraflow.weights.manifest import expect
from contraflow.weights.probe import make_probe, probe_prompts
from contraflow.weights.publish import Publisher

BIAS = "layers.1.mlp.router.correction_bias"
GLM = ModelConfig(
    family="glm4_moe", vocab=32, dim=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=16, experts=8, top_k=2,
    expert_ffn=8, dense_layers=(0,), shared_experts=1, renormalise=True, rotary_dim=4,
)  # fmt: skip


def made(seed: int) -> Decoder:
    decoder = new_decoder(GLM, seed=seed, std=0.2)
    with torch.no_grad():
        decoder.get_parameter(BIAS).normal_(0, 1, generator=torch.Generator().manual_seed(seed))
    return decoder


def trained(decoder: Decoder) -> None:
    length = 12
    sample = Sample(
        tokens=np.arange(length, dtype=np.int32),
        mask=np.arange(length) > 0,
        behaviour=np.zeros(length, np.float32),
        advantages=np.ones(length, np.float32),
        versions=np.zeros(length, np.int32),
    )
    optimizer = Optimizer(decoder, Train(learning_rate=0.1, warmup_updates=0, weight_decay=0.1))
    updater = Updater(decoder, optimizer, Account(lambda: 0.0), balance_weight=0.1)
    updater.update(
        pack([sample], tokens_per_batch=99, reduction="token"), lambda b, f, scored: -scored.logprobs_N.mean()
    )
    assert not any(BIAS in name for name in optimizer.moments())
    optimizer.restore(optimizer.snapshot())


def consent(fault: CarrierError | None) -> None:
    """Of an engine of one rank."""
    if fault is not None:
        raise fault


def test_training_moves_everything_but_the_bias() -> None:
    decoder = made(1)
    before = {name: weight.detach().clone() for name, weight in decoder.named_parameters()}
    trained(decoder)
    assert {name for name, weight in decoder.named_parameters() if torch.equal(weight, before[name])} == {BIAS}


def test_an_engine_given_a_published_version_chooses_as_the_trainer_does(tmp_path) -> None:
    """By manifest and carrier, into an engine that held another bias; the routes it records are the trainer's own."""
    trainer, engine = made(1), made(2)
    carrier = open_carrier(Weights(carrier="blob", chunk_bytes=512), tmp_path)
    probe = make_probe(trainer, probe_prompts(32, prompts=4, tokens=16, seed=1), 1e-4)
    publisher = Publisher(carrier)
    manifest = publisher.publish(
        dict(trainer.state_dict()), version=Version(1, 1), model=GLM.digest(), probe=probe, chunk_bytes=512
    )
    assert [tensor.shape for tensor in manifest.tensors if tensor.name == BIAS] == [(8,)]

    async def recorded() -> Routes:
        section = Engine(context_tokens=64, kv_tokens=256, max_sequences=4, routes=True)
        native = NativeEngine(engine, section, clock=time.perf_counter, stepping="inline", version=Version(1, 0))
        await native.swap(Version(1, 1), fetch(manifest, carrier).tensors, manifest.probe)
        ask = Request(id="a", prompt=np.arange(31, dtype=np.int32), seed=0, max_new_tokens=1, want_routes=True)
        completion = await native.generate(ask)
        await native.close()
        assert completion.routes is not None
        return completion.routes

    tape = RouterTape()
    trainer(torch.arange(31), torch.arange(31), PackedPlan.of([0, 31]), tape=tape)
    assert np.array_equal(asyncio.run(recorded()), tape.routes().numpy())
    publisher.close()


def test_a_cut_and_a_refresh_carry_it(tmp_path) -> None:
    trainer, engine = made(1), made(2)
    assert expect("", trainer.state_dict()).shapes[BIAS] == (8,)
    tensors = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    probe = make_probe(trainer, probe_prompts(32, prompts=4, tokens=16, seed=1), 1e-4)
    live = LiveWeights(engine)
    live.load(tensors, probe, consent)
    routes = []
    save_folder(trainer, tmp_path)
    for decoder in (trainer, engine, load_folder(tmp_path)):
        assert torch.equal(decoder.get_parameter(BIAS), trainer.get_parameter(BIAS))
        tape = RouterTape()
        decoder(torch.arange(32), torch.arange(32), PackedPlan.of([0, 32]), tape=tape)
        routes.append(tape.routes())
    assert torch.equal(routes[0], routes[1])
    assert torch.equal(routes[0], routes[2])
    with pytest.raises(CarrierError):  # an engine that kept its own would route, and so answer, differently
        live.load(tensors | {BIAS: -tensors[BIAS]}, probe, consent)
