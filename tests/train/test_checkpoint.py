import resource
from contextlib import contextmanager

import msgspec
import pytest
import torch

from contraflow.config import Train
from contraflow.cuts import CutId
from contraflow.errors import BlobError, CheckpointError, CutTaken, CutTorn
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import load_folder
from contraflow.parallel.spread import Spread
from contraflow.train import shards
from contraflow.train.checkpoint import Cut, Snapshot, commit, cut_of, export, split
from contraflow.train.checkpoint import load as load_cut
from contraflow.train.optimizer import Optimizer
from tests.cut_writer import space_in
from tests.train.cutting import file_of, save, whole

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
    """A folder for cuts, `write(step)` that makes one of a model trained by `step` updates, and `load(name)`."""
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


def load(folder, name, **how):
    return load_cut(space_in(folder), name, **how)


@pytest.mark.parametrize("part_bytes", [64 << 20, 5000, 1])
def test_what_is_loaded_goes_on_bit_for_bit(place, monkeypatch, part_bytes):
    folder, write, decoder, optimizer = place
    monkeypatch.setattr(shards, "PART_BYTES", part_bytes)
    loaded = load(folder, write(4))
    assert (loaded.cut.step, loaded.cut.updates, loaded.cut.seed) == (4, 4, 7)
    twin, resumed = loaded.spread.decoder, Optimizer(loaded.spread.decoder, TRAIN)
    assert same(decoder, twin)
    resumed.load(loaded.moments, loaded.cut.updates)
    for seed in range(100, 104):  # past the warm-up
        push(decoder, optimizer, seed)
        push(twin, resumed, seed)
    assert same(decoder, twin)


def test_a_cut_is_of_the_moment_it_was_taken_whatever_training_does_meanwhile(place, model_folder):
    folder, write, decoder, optimizer = place
    write(2)
    wanted = {name: weight.clone() for name, weight in decoder.named_parameters()}
    taken = Snapshot(cut(decoder, 3, updates=2), spread=Spread(decoder), optimizer=optimizer, companions=model_folder)
    moments = {label: moment.clone() for label, moment in optimizer.moments().items()}
    for seed in range(5):
        push(decoder, optimizer, seed)
    space = space_in(folder)
    commit(space, taken.cut, "w", taken.write(space, "w"), keep=9, about={})
    loaded = load(folder, "line-1-step-3")
    assert all(torch.equal(weight, wanted[name]) for name, weight in loaded.spread.decoder.named_parameters())
    assert loaded.moments.keys() == moments.keys()
    assert all(torch.equal(loaded.moments[label], moment) for label, moment in moments.items())


def test_a_part_is_no_larger_than_it_should_be_and_the_copy_is_as_large_as_promised(place, monkeypatch):
    folder, write, decoder, optimizer = place
    monkeypatch.setattr(shards, "PART_BYTES", 4096)
    name = write(1)
    row = max(p.nbytes // (len(p) if p.ndim > 1 else 1) for p in decoder.parameters())
    manifest = space_in(folder).manifest(name)
    tensors = [part for part in manifest.parts if part.name.startswith("rank-") and not part.name.endswith("index")]
    assert len(tensors) > 10
    assert max(part.size for part in tensors) <= max(4096, row) + 4096  # and the header
    held = shards.Copy(Spread(decoder), optimizer)
    assert sum(slab.data.nbytes for slab in held._slabs) == 12 * sum(p.numel() for p in decoder.parameters())


def test_a_cut_before_the_first_update_can_be_loaded_too(place):
    folder, write, decoder, _ = place
    loaded = load(folder, write(0))
    assert (loaded.moments, loaded.cut.updates) == ({}, 0)
    assert same(decoder, loaded.spread.decoder)


def test_transformers_loads_the_model_and_its_tokenizer_that_are_exported_from_a_cut(place, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, write, decoder, _ = place
    export(space_in(folder), write(2), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("12+34=").input_ids) == "12+34="
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.get_input_embeddings().weight, decoder.embed)


def test_the_newest_are_kept_and_a_later_line_is_newer_whatever_its_step(place):
    folder, write, *_ = place
    for step in (1, 2, 3):
        write(step, keep=2)
    assert space_in(folder).names() == ["line-1-step-3", "line-1-step-2"]
    write(3, line=2, keep=2)
    assert space_in(folder).names() == ["line-2-step-3", "line-1-step-3"]
    assert cut_of(space_in(folder).newest().manifest).line == 2
    assert sorted(path.name for path in (folder / "parts").iterdir()) == ["line-1-step-3", "line-2-step-3"]


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def damage_missing(path):
    path.unlink()


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_missing], ids=lambda d: d.__name__)
@pytest.mark.parametrize("part", ["model/config.json", "rank-00000/00000", "rank-00000/index"])
def test_a_torn_cut_is_passed_over_and_refused_by_name_with_the_next_older_one(place, damage, part):
    folder, write, *_ = place
    good, torn = write(1), write(2)
    damage(file_of(folder, CutId(torn, "w"), part))
    newest = space_in(folder).newest()
    assert newest.manifest.id.name == good
    assert len(newest.refused) == 1
    assert part in newest.refused[0]
    with pytest.raises(CheckpointError, match=rf"{torn}.*{part}.*the next older cut is {good}"):
        load(folder, torn)


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip], ids=lambda d: d.__name__)
def test_a_torn_manifest_is_no_cut(place, damage):
    folder, write, *_ = place
    good, torn = write(1), write(2)
    damage(folder / "manifests" / torn)
    assert space_in(folder).newest().manifest.id.name == good
    with pytest.raises(CutTorn, match=rf"{torn}.*manifest.*the next older cut is {good}"):
        space_in(folder).manifest(torn)


def test_elements_that_no_part_holds_are_missed(place):
    """The digests are right, and a rank's index is not."""
    folder, write, *_ = place
    write(1)
    space = space_in(folder)
    manifest = space.manifest("line-1-step-1")
    index = msgspec.json.decode(space.read(manifest, manifest.part("rank-00000/index")), type=shards.Index)
    (part, entries), *_ = index.parts.items()
    less = msgspec.structs.replace(index, parts={**index.parts, part: entries[1:]})
    here = CutId("line-1-step-2", "w")
    parts = [space.put(here, p.name, space.read(manifest, p)) for p in manifest.parts if "index" not in p.name]
    parts.append(space.put(here, "rank-00000/index", msgspec.json.encode(less)))
    space.commit(here, parts, manifest.about)
    with pytest.raises(CheckpointError, match=f"does not hold all of weight '{entries[0].name}'"):
        load(folder, here.name)


def test_a_second_writer_of_a_cut_is_told_so_and_leaves_the_first_alone(place, model_folder):
    folder, write, decoder, optimizer = place
    name = write(2)
    before = whole(folder, name)
    push(decoder, optimizer, 5)
    of = {"spread": Spread(decoder), "optimizer": optimizer, "companions": model_folder}
    with pytest.raises(CutTaken, match="belongs to writer w"):
        save(folder, cut(decoder, 2, updates=3), writer="other", **of)
    after = whole(folder, name)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[label], after[label]) for label in before)


def test_a_cut_of_another_model_is_refused(place):
    folder, write, decoder, _ = place
    name = write(1)
    assert load(folder, name, expected_model=decoder.config.digest()).cut.step == 1
    other = new_decoder(ModelConfig.from_hf(decoder.config.to_hf() | {"num_hidden_layers": 1}), seed=0)
    with pytest.raises(CheckpointError, match="the recipe's model is"):
        load(folder, name, expected_model=other.config.digest())


@contextmanager
def file_size_limit(nbytes):
    """No file of this process may grow beyond `nbytes`: what a full disk does to a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 100, 1_000, 20_000])
def test_a_full_disk_leaves_the_earlier_cut_and_nothing_else(place, room):
    folder, write, decoder, optimizer = place
    earlier = write(1)
    push(decoder, optimizer, 5)
    with file_size_limit(room), pytest.raises(CheckpointError, match=r"line-1-step-2.*earlier cuts are untouched"):
        write(2, keep=1)
    assert space_in(folder).names() == [earlier]
    left = folder / "parts" / "line-1-step-2"
    assert not left.exists() or not [path for path in left.rglob("*") if path.is_file()]
    assert load(folder, earlier).cut.step == 1
    write(2)  # once there is room again
    assert space_in(folder).newest().manifest.id.name == "line-1-step-2"


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_trained(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BlobError, match=r"file/checkpoints.*Not a directory"):
        space_in(tmp_path / "file" / "checkpoints")


def test_a_cut_is_named_by_where_it_is():
    assert split("s3://bucket/run/line-1-step-20") == ("s3://bucket/run", "line-1-step-20")
    assert split("s3://bucket/run") == ("s3://bucket/run", "")
    assert split("runs/a/checkpoints/line-0-step-5/") == ("runs/a/checkpoints", "line-0-step-5")
    assert split("line-0-step-5") == (".", "line-0-step-5")
