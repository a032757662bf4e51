import resource
import shutil
from contextlib import contextmanager

import pytest
import torch

from contraflow.config import Train
from contraflow.errors import CheckpointError
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder
from contraflow.parallel.spread import Spread
from contraflow.train.checkpoint import Cut, cut_step, cuts, is_whole, latest, load, save
from contraflow.train.optimizer import Optimizer

TRAIN = Train(learning_rate=1e-2, warmup_updates=3, weight_decay=0.01)


def push(decoder, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer.clear()
    for parameter in decoder.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.apply()


def cut(decoder, step, *, line=1, updates=0):
    return Cut(line=line, step=step, updates=updates, seed=7, model=decoder.config.digest(), recipe="r")


@pytest.fixture
def place(tmp_path, model_folder):
    """A folder for cuts, and `write(step)` that makes one of a model trained by `step` updates."""
    folder = tmp_path / "checkpoints"
    decoder = load_folder(model_folder)
    optimizer = Optimizer(decoder, TRAIN)

    def write(step, *, line=1, keep=9):
        while optimizer.updates < step:
            push(decoder, optimizer, optimizer.updates)
        at = cut(decoder, step, line=line, updates=optimizer.updates)
        return save(folder, at, spread=Spread(decoder), optimizer=optimizer, companions=model_folder, keep=keep)

    return folder, write, decoder, optimizer


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_what_is_loaded_goes_on_bit_for_bit(place):
    _, write, decoder, optimizer = place
    loaded = load(write(4))
    assert (loaded.cut.step, loaded.cut.updates, loaded.cut.seed) == (4, 4, 7)
    twin, resumed = loaded.spread.decoder, Optimizer(loaded.spread.decoder, TRAIN)
    assert same(decoder, twin)
    resumed.load(loaded.moments, loaded.cut.updates)
    for seed in range(100, 104):  # past the warm-up
        push(decoder, optimizer, seed)
        push(twin, resumed, seed)
    assert same(decoder, twin)


def test_a_cut_before_the_first_update_can_be_loaded_too(place):
    _, write, decoder, _ = place
    loaded = load(write(0))
    assert (loaded.moments, loaded.cut.updates) == ({}, 0)
    assert same(decoder, loaded.spread.decoder)


def test_transformers_loads_the_model_and_its_tokenizer_from_a_cut(place, model_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, write, decoder, _ = place
    folder = write(2) / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("12+34=").input_ids) == "12+34="
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.get_input_embeddings().weight, decoder.embed)


def test_the_newest_are_kept_and_a_later_line_is_newer_whatever_its_step(place):
    folder, write, *_ = place
    for step in (1, 2, 3):
        write(step, keep=2)
    assert [path.name for path in cuts(folder)] == ["line-1-step-3", "line-1-step-2"]
    write(3, line=2, keep=2)
    assert [path.name for path in cuts(folder)] == ["line-2-step-3", "line-1-step-3"]
    assert latest(folder) == folder / "line-2-step-3"
    assert cut_step(folder / "line-2-step-3") == 3


def test_steps_are_ordered_as_numbers(place):
    folder, write, *_ = place
    for step in (9, 10):
        write(step)
    assert latest(folder) == folder / "line-1-step-10"


def test_nothing_there_is_no_cut(tmp_path):
    assert latest(tmp_path / "none") is None
    (tmp_path / "line-1-step-x").mkdir()
    assert cuts(tmp_path) == []


def damage_truncate(folder):
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(folder):
    path = folder / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def damage_missing(folder):
    (folder / "model" / "config.json").unlink()


def damage_extra(folder):
    (folder / "model" / "model-00002-of-00002.safetensors").write_bytes(b"")


def damage_state(folder):
    (folder / "state.json").write_text("{}", encoding="utf-8")


def damage_listing(folder):
    (folder / "files.json").write_text('{"model/config.json": 3', encoding="utf-8")


def damage_unlisted(folder):
    (folder / "files.json").unlink()


DAMAGES = [
    damage_truncate,
    damage_flip,
    damage_missing,
    damage_extra,
    damage_state,
    damage_listing,
    damage_unlisted,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_torn_cut_is_passed_over_and_refused_when_asked_for(place, damage):
    folder, write, *_ = place
    good, torn = write(1), write(2)
    damage(torn)
    assert latest(folder) == good
    with pytest.raises(CheckpointError, match="line-1-step-2"):
        load(torn)


def test_a_torn_cut_of_the_same_step_is_written_again(place):
    _, write, *_ = place
    folder = write(2)
    damage_flip(folder)
    assert write(2) == folder
    assert is_whole(folder)


def test_a_whole_cut_of_the_same_step_is_left_as_it_is(place):
    _, write, *_ = place
    stamp = (write(2) / "state.json").stat().st_mtime_ns
    assert (write(2) / "state.json").stat().st_mtime_ns == stamp


def test_a_cut_of_another_model_is_refused(place):
    _, write, decoder, _ = place
    folder = write(1)
    assert load(folder, expected_model=decoder.config.digest()).cut.step == 1
    other = new_decoder(ModelConfig.from_hf(decoder.config.to_hf() | {"num_hidden_layers": 1}), seed=0)
    with pytest.raises(CheckpointError, match="the recipe's model is"):
        load(folder, expected_model=other.config.digest())


@contextmanager
def file_size_limit(nbytes):
    """No file of this process may grow beyond `nbytes`: what a full disk does to a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 100, 20_000, 60_000])
def test_a_full_disk_leaves_the_earlier_cut_and_nothing_else(place, room):
    folder, write, decoder, optimizer = place
    earlier = write(1)
    push(decoder, optimizer, 5)
    sizes = [path.stat().st_size for path in earlier.rglob("*") if path.is_file()]
    assert max(sizes) > 60_000
    with file_size_limit(room), pytest.raises(CheckpointError, match=r"line-1-step-2.*earlier ones are untouched"):
        write(2, keep=1)
    assert [path.name for path in folder.iterdir()] == [earlier.name]
    assert load(earlier).cut.step == 1
    assert is_whole(write(2))  # once there is room again


def test_what_a_crash_left_behind_is_swept_and_never_taken_for_a_cut(place):
    folder, write, *_ = place
    good = write(1)
    shutil.copytree(good, folder / ".writing-line-1-step-2")
    shutil.copytree(good, folder / ".removing-line-1-step-0")
    assert latest(folder) == good
    write(2)
    assert sorted(path.name for path in folder.iterdir()) == ["line-1-step-1", "line-1-step-2"]


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(place, tmp_path):
    _, _, decoder, optimizer = place
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(
            tmp_path / "file" / "checkpoints",
            cut(decoder, 1),
            spread=Spread(decoder),
            optimizer=optimizer,
            companions=tmp_path,
            keep=1,
        )
