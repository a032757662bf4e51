"""What ranks hold of whole tensors, after all axes have cut: every element counted once, read back bit for bit."""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contraflow.config import Parallel
from contraflow.errors import ModelError
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import open_folder, save_folder
from contraflow.model.names import Part, parts
from contraflow.model.reading import TensorFiles
from contraflow.parallel.layout import place
from contraflow.parallel.pieces import pieces, put, shapes, take

MOE = ModelConfig(
    family="qwen3_moe", vocab=11, dim=16, layers=4, heads=4, kv_heads=4, head_dim=4, ffn=12, experts=8, top_k=2,
    expert_ffn=8, dense_layers=(1,), attention_bias=True,
)  # fmt: skip
WHOLE = shapes(MOE)


@st.composite
def meshes(draw: st.DrawFn) -> Parallel:
    dp, tp, cp, pp = (draw(st.sampled_from([1, 2])) for _ in range(4))
    dp = draw(st.sampled_from([dp, 3]))  # sizes that do not divide: short and empty shares
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if (dp * tp * cp) % e == 0]))
    return Parallel(dp=dp, tp=tp, cp=cp, pp=pp, ep=ep)


@settings(max_examples=60)
@given(parallel=meshes())
def test_every_element_is_in_exactly_one_counted_piece(parallel: Parallel) -> None:
    found: dict[str, Counter[int]] = {name: Counter() for name in WHOLE}
    for rank in range(parallel.ranks):
        for name, piece in pieces(MOE, parallel, place(rank, parallel), WHOLE).items():
            if piece.counted:
                numbered = torch.arange(math.prod(WHOLE[name])).view(WHOLE[name])
                found[name].update(take(numbered, piece).flatten().tolist())
    for name, counts in found.items():
        assert set(counts.values()) == {1}, name
        assert len(counts) == math.prod(WHOLE[name]), name


@settings(max_examples=60)
@given(parallel=meshes(), data=st.data())
def test_counted_pieces_put_together_give_the_whole(parallel: Parallel, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    whole = torch.randn(WHOLE[name])
    built = torch.full_like(whole, torch.nan)
    for rank in range(parallel.ranks):
        piece = pieces(MOE, parallel, place(rank, parallel), WHOLE).get(name)
        if piece is not None and piece.counted:
            put(built, piece, take(whole, piece))
    assert torch.equal(built, whole)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Path]:
    decoder, folder = new_decoder(MOE, seed=3), tmp_path_factory.mktemp("model")
    save_folder(decoder, folder, shard_bytes=4000)
    return decoder, folder


@settings(max_examples=60)
@given(data=st.data())
def test_any_box_of_a_tensor_is_read_as_it_was_written(saved: tuple[Decoder, Path], data: st.DataObject) -> None:
    decoder, folder = saved
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    ranges = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))) for n in WHOLE[name]]
    box = tuple((min(a, b - 1), b) for a, b in ranges)
    with open_folder(folder) as files:
        found = files.read(parts(MOE)[name], box)
    wanted = dict(decoder.named_parameters())[name][tuple(slice(a, b) for a, b in box)]
    assert torch.equal(found, wanted)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_boxes_of_experts_that_lie_turned_on_disk_are_read_too(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    config = ModelConfig(
        family="gpt_oss", vocab=11, dim=16, layers=1, heads=2, kv_heads=1, head_dim=4, experts=4, top_k=2, expert_ffn=8,
        swiglu_alpha=1.0, swiglu_limit=1.0,
    )  # fmt: skip
    decoder, folder = new_decoder(config, seed=3), tmp_path_factory.mktemp("oss")
    save_folder(decoder, folder)
    for name in ("layers.0.mlp.gate_up", "layers.0.mlp.down", "layers.0.mlp.down_bias"):
        whole = dict(decoder.named_parameters())[name]
        ranges = [data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n))) for n in whole.shape]
        box = tuple((min(a, b - 1), b) for a, b in ranges)
        with open_folder(folder) as files:
            found = files.read(parts(config)[name], box)
        assert torch.equal(found, whole[tuple(slice(a, b) for a, b in box)])


def test_a_tensor_that_is_missing_or_of_another_shape_is_refused(saved: tuple[Decoder, Path]) -> None:
    _, folder = saved
    with open_folder(folder) as files, pytest.raises(ModelError, match=r"'model\.norm\.weight' is \[16\], but must be"):
        files.read([Part("model.norm.weight", (15,))], ((0, 15),))
    with TensorFiles({}) as none, pytest.raises(ModelError, match="'gone' is missing"):
        none.read([Part("gone", (1,))], ((0, 1),))


def test_a_folder_with_a_tensor_of_another_model_is_refused(saved: tuple[Decoder, Path], tmp_path: Path) -> None:
    decoder, _ = saved
    save_folder(decoder, tmp_path)
    config = ModelConfig(
        family="qwen3", vocab=11, dim=16, layers=4, heads=4, kv_heads=4, head_dim=4, ffn=12, attention_bias=True
    )
    save_folder(new_decoder(config, seed=0), tmp_path / "other")
    (tmp_path / "other" / "config.json").replace(tmp_path / "config.json")
    with pytest.raises(ModelError, match="is not part of a qwen3 model"):
        open_folder(tmp_path)
