"""Batch-invariant kernels: a row's result has the same bits alone, among others, at any place, and is its formula."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from contraflow.errors import ModelError
from contraflow.model.invariant_cpu import InvariantKernels, built_invariant
from contraflow.model.paged import Fed, Pages, Placing, Seen, Target

DRAWN = settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.generate])
WIDTHS = st.sampled_from([1, 2, 3, 7, 8, 9, 16, 20, 31, 64, 65])
ROWS = st.sampled_from([0, 1, 2, 3, 8, 31, 32, 33, 70])
SEEDS = st.integers(0, 999)
PRECISION = 1e-6  # relative to the largest term of a sum
Of = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def kernels() -> InvariantKernels:
    made = built_invariant()
    if isinstance(made, str):
        pytest.skip(made)
    return made


def noise(seed: int, *shape: int) -> Tensor:
    """Numbers of very different sizes: where another order of sums shows."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws) * torch.randn(shape, generator=draws).mul_(1.5).exp_()


def assert_rows_alone(function: Callable[..., Tensor], *rows: Tensor, seed: int) -> None:
    """What comes out for a row is the same in the batch, alone, and in another batch at another place."""
    together, count = function(*rows), len(rows[0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: max(count - 1, 0)]
    assert torch.equal(function(*[x[order] for x in rows]), together[order])
    for place in range(min(count, 5)):
        assert torch.equal(function(*[x[place : place + 1] for x in rows])[0], together[place])


def assert_close(found: Tensor, wanted: Tensor, size: Tensor | float) -> None:
    """To a part of the largest of what was added up."""
    assert found.shape == wanted.shape
    assert bool(((found.double() - wanted).abs() <= PRECISION * size).all())


def test_matrix_products(kernels: InvariantKernels) -> None:
    @DRAWN
    @given(tokens=ROWS, inputs=WIDTHS, outputs=WIDTHS, seed=SEEDS, biased=st.booleans())
    def law(tokens: int, inputs: int, outputs: int, seed: int, biased: bool) -> None:
        x, weight = noise(seed, tokens, inputs), noise(seed + 1, outputs, inputs)
        bias = noise(seed + 2, outputs) if biased else None
        assert_rows_alone(lambda x: kernels.linear(x, weight, bias), x, seed=seed)
        size = x.abs().double() @ weight.abs().double().t() + (0 if bias is None else bias.abs())
        wanted = x.double() @ weight.double().t() + (0 if bias is None else bias)
        assert_close(kernels.linear(x, weight, bias), wanted, size)

    law()


def test_an_output_does_not_depend_on_the_others(kernels: InvariantKernels) -> None:
    x, weight = noise(1, 9, 21), noise(2, 13, 21)
    whole = kernels.linear(x, weight)
    for place in range(13):
        assert torch.equal(kernels.linear(x, weight[place : place + 1])[:, 0], whole[:, place])


def test_what_is_no_number_stays_so_in_its_own_row(kernels: InvariantKernels) -> None:
    x = torch.randn(5, 11)
    x[3, 10] = float("nan")
    for out in (kernels.linear(x, torch.randn(6, 11)), kernels.norm(x, torch.ones(11), 1e-6), kernels.softmax(x)):
        assert out[3].isnan().all()
        assert out[[0, 1, 2, 4]].isfinite().all()
    assert kernels.swiglu(torch.full((1, 6), float("nan"))).isnan().all()


def test_norms_activations_and_softmaxes(kernels: InvariantKernels) -> None:
    @DRAWN
    @given(tokens=ROWS, width=WIDTHS, seed=SEEDS)
    def law(tokens: int, width: int, seed: int) -> None:
        x, weight = noise(seed, tokens, width), noise(seed + 1, width)
        wide = x.double()
        assert_rows_alone(lambda x: kernels.norm(x, weight, 1e-6), x, seed=seed)
        wanted = wide / (wide.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
        assert_close(kernels.norm(x, weight, 1e-6), wanted, wanted.abs())
        both = noise(seed + 2, tokens, 2 * width)
        gate, up = both.double().chunk(2, 1)
        assert_rows_alone(kernels.swiglu, both, seed=seed)
        assert_close(kernels.swiglu(both), gate / (1 + (-gate).exp()) * up, (gate * up).abs())
        assert_rows_alone(kernels.softmax, x, seed=seed)
        assert_close(kernels.softmax(x), wide.softmax(1), 1)

    law()


def test_turns_are_those_of_the_angle_in_fp32(kernels: InvariantKernels) -> None:
    positions, radians = torch.randint(0, 5000, (37,)), torch.randn(10).exp()
    cos, sin = kernels.rotation(positions, radians, 1.25)
    angles = (positions[:, None, None] * radians).double()
    assert_close(cos, angles.cos() * 1.25, 1)
    assert_close(sin, angles.sin() * 1.25, 1)
    for part in (slice(0, 1), slice(5, 12)):
        again = kernels.rotation(positions[part], radians, 1.25)
        assert torch.equal(again[0], cos[part])
        assert torch.equal(again[1], sin[part])


@pytest.mark.parametrize("norm", ["none", "head", "projection"])
@pytest.mark.parametrize(("dim", "turned", "clip"), [(8, 8, None), (24, 8, 0.7), (10, 10, 0.2), (6, 2, None)])
def test_placing_is_the_formula_and_goes_to_its_slots(
    kernels: InvariantKernels, norm: str, dim: int, turned: int, clip: float | None
) -> None:
    heads, groups, tokens, size = 6, 2, 9, 4
    qkv, angles = noise(1, tokens, heads + 2 * groups, dim), torch.rand(tokens, 1, turned) * 6
    shape = {"none": None, "head": (2, dim), "projection": ((heads + groups) * dim,)}[norm]
    weight = None if shape is None else torch.rand(shape) + 0.5
    placing, turn = Placing(weight, 1e-3, clip), (angles.cos(), angles.sin())
    placed = kernels.heads(qkv, turn, placing, groups)
    q, k, v = qkv.double().split([heads, groups, groups], 1)
    if weight is not None:
        q, k = normed(q, k, weight.double())
    if clip is not None:
        q, k, v = (x.clamp(-clip, clip) for x in (q, k, v))
    q, k = (turn_by(x, angles.double()) for x in (q, k))
    assert_close(placed, torch.cat((q, k, v), 1), 4 * torch.cat((q, k, v), 1).abs().amax(-1, keepdim=True))
    assert_rows_alone(lambda x, c, s: kernels.heads(x, (c, s), placing, groups), qkv, *turn, seed=1)

    pool = torch.randn(5, 2, groups, size, dim)
    slots, layer = torch.randperm(5 * size)[:tokens], pool.flatten(0, 2).flatten(1).clone()
    queries = kernels.place(qkv, *turn, placing, Target(layer, slots, size), kv_heads=groups)
    assert torch.equal(queries, placed[:, :heads])
    for token, slot in enumerate(slots.tolist()):
        pool[slot // size, :, :, slot % size] = placed[token, heads:].unflatten(0, (2, groups))
    assert torch.equal(layer.view(pool.shape), pool)


def normed(q: Tensor, k: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if weight.ndim == 2:
        return tuple(x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight[i] for i, x in enumerate((q, k)))  # type: ignore[return-value]
    parts = zip((q, k), weight.split([q[0].numel(), k[0].numel()]), strict=True)
    return tuple(  # type: ignore[return-value]
        (x.flatten(1) / (x.flatten(1).square().mean(-1, keepdim=True) + 1e-3).sqrt() * w).view_as(x) for x, w in parts
    )


def turn_by(x: Tensor, angles: Tensor) -> Tensor:
    """Each dimension by its own angle, as the kernel is given them."""
    part = x[..., : angles.shape[-1]]
    turned = part * angles.cos() + part.roll(part.shape[-1] // 2, -1) * angles.sin()
    return torch.cat((turned, x[..., angles.shape[-1] :]), -1)


@pytest.mark.parametrize(("groups", "share", "dim"), [(2, 2, 32), (1, 4, 64), (3, 1, 24), (2, 3, 5), (1, 1, 65)])
def test_attention_is_one_function_packed_paged_in_chunks_and_by_the_token(
    kernels: InvariantKernels, groups: int, share: int, dim: int
) -> None:
    @DRAWN
    @given(
        lengths=st.lists(st.sampled_from([1, 2, 7, 8, 9, 17, 33]), max_size=4),
        size=st.sampled_from([1, 3, 8, 16]),
        chunk=st.sampled_from([1, 2, 5, 8, 40]),
        seed=SEEDS,
    )
    def law(lengths: list[int], size: int, chunk: int, seed: int) -> None:
        tokens, heads = sum(lengths), groups * share
        q, k, v = (noise(seed + i, tokens, n, dim) for i, n in enumerate((heads, groups, groups)))
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        packed = kernels.packed(q, k, v, starts)
        parts = list(zip(*(x.split(lengths) for x in (q, k, v, packed)), strict=True))
        for one_q, one_k, one_v, one in parts:
            alone = torch.tensor([0, len(one_q)], dtype=torch.int32)
            assert torch.equal(kernels.packed(one_q, one_k, one_v, alone), one)
            wanted, most = by_formula(one_q, one_k, one_v)
            assert_close(one, wanted, 30 * most)
        paged = in_pages(kernels, [part[:3] for part in parts], size=size, chunk=chunk, seed=seed)
        assert torch.equal(torch.cat([*paged, q[:0]]), packed)

    law()


def by_formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention in float64, and the largest that its scores and values can be."""
    share, seen = q.shape[1] // k.shape[1], torch.ones(len(q), len(q)).tril().bool()
    wide_k, wide_v = (x.double().repeat_interleave(share, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), wide_k) / q.shape[-1] ** 0.5
    sizes = torch.einsum("qhd,khd->hqk", q.double().abs(), wide_k.abs()) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_v), (1 + sizes.amax()) * wide_v.abs().amax()


def in_pages(
    kernels: InvariantKernels, parts: list[tuple[Tensor, ...]], *, size: int, chunk: int, seed: int
) -> list[Tensor]:
    """Each sequence fed by chunks, out of step with the others, from scattered blocks with no numbers behind it."""
    groups, dim = (parts[0][1].shape[1], parts[0][1].shape[2]) if parts else (1, 1)
    counts = [-(-len(q) // size) for q, *_ in parts]
    blocks = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    pool = torch.full((sum(counts) + 1, 2, groups, size, dim), float("nan"))
    tables = torch.zeros(len(parts), max(counts, default=0) + 1, dtype=torch.int64)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    done, out = [0] * len(parts), [part[0].new_zeros(part[0].shape) for part in parts]
    while any(at < len(part[0]) for at, part in zip(done, parts, strict=True)):
        fed = [min(chunk + row, len(part[0]) - at) for row, (at, part) in enumerate(zip(done, parts, strict=True))]
        queries = torch.full((len(parts), max(fed)), -1)
        begin, news = 0, list[Tensor]()
        for row, (count, (q, k, v)) in enumerate(zip(fed, parts, strict=True)):
            for place in range(done[row], done[row] + count):
                block = int(tables[row, place // size])
                pool[block, 0, :, place % size], pool[block, 1, :, place % size] = k[place], v[place]
            queries[row, :count] = torch.arange(begin, begin + count)
            news.append(q[done[row] : done[row] + count])
            begin, done[row] = begin + count, done[row] + count
        held = Pages(pool.flatten(0, 2).flatten(1), tables, torch.tensor(done), groups, size)
        if max(fed) == min(fed) == 1:
            found = kernels.decode(torch.cat(news), held, Seen(None, None))
        else:
            found = kernels.prefill(torch.cat(news), held, Fed(queries, torch.tensor(fed)), Seen(None, None))
        for row, rows in enumerate(found.split(fed)):
            out[row][done[row] - fed[row] : done[row]] = rows
    return out


def test_a_padding_row_gives_zeros_and_reads_nothing(kernels: InvariantKernels) -> None:
    held = Pages(torch.full((2, 8), float("nan")), torch.zeros(1, 1).long(), torch.zeros(1).long(), 1, 4)
    assert kernels.decode(torch.randn(1, 3, 2), held, Seen(None, None)).eq(0).all()
    with pytest.raises(ModelError, match="no sinks and no window"):
        kernels.decode(torch.randn(1, 3, 2), held, Seen(None, 5))


@pytest.mark.parametrize(("experts", "choices", "dim", "ffn"), [(8, 2, 64, 96), (3, 3, 7, 13), (1, 1, 24, 8)])
def test_mixtures(kernels: InvariantKernels, experts: int, choices: int, dim: int, ffn: int) -> None:
    @DRAWN
    @given(tokens=ROWS, seed=SEEDS, skew=st.booleans())
    def law(tokens: int, seed: int, skew: bool) -> None:
        draws = torch.Generator().manual_seed(seed)
        x, weights = noise(seed, tokens, dim), torch.rand(tokens, choices, generator=draws)
        ids = torch.randint(-1, 1 if skew else experts, (tokens, choices), generator=draws)  # -1: none
        gate_up, down = noise(seed + 1, experts, 2 * ffn, dim), noise(seed + 2, experts, dim, ffn)
        assert_rows_alone(lambda x, i, w: kernels.experts(x, i, w, gate_up, down), x, ids, weights, seed=seed)
        wanted, size = torch.zeros(2, tokens, dim, dtype=torch.float64)
        for token, row in enumerate(ids.tolist()):
            for choice, expert in enumerate(row):
                if expert >= 0:
                    wide, weight = x[token].double(), weights[token, choice].double()
                    gate, up = (gate_up[expert].double() @ wide).chunk(2)
                    most_gate, most_up = (gate_up[expert].abs().double() @ wide.abs()).chunk(2)
                    wanted[token] += weight * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
                    size[token] += weight * (down[expert].abs().double() @ (most_gate * most_up))
        assert_close(kernels.experts(x, ids, weights, gate_up, down), wanted, size)

    law()


def test_log_probabilities_and_samples_agree_to_the_bit(kernels: InvariantKernels) -> None:
    @DRAWN
    @given(tokens=ROWS, vocab=WIDTHS, seed=SEEDS, temperature=st.sampled_from([0.3, 1.0, 1.7]))
    def law(tokens: int, vocab: int, seed: int, temperature: float) -> None:
        draws = torch.Generator().manual_seed(seed)
        logits, uniforms = noise(seed, tokens, vocab), torch.rand(tokens, generator=draws)
        scales = torch.full((tokens,), 1 / temperature)
        greedy = torch.rand(tokens, generator=draws) < 0.3
        asked = {"scales_B": scales, "uniforms_B": uniforms}
        chosen, found = kernels.sample(logits, greedy_B=greedy, **asked)
        told, entropy = kernels.logprobs(logits, chosen, 1 / temperature)
        assert torch.equal(found, told)
        wide = (logits.double() / temperature).log_softmax(1)
        assert_close(told, wide.gather(1, chosen[:, None])[:, 0], 1 + logits.abs().amax(1) / temperature)
        assert_close(entropy, -(wide.exp() * wide).sum(1), 1 + logits.abs().amax(1) / temperature)
        assert torch.equal(chosen[greedy], logits.argmax(1)[greedy])
        assert_rows_alone(
            lambda x, u, s, g: kernels.sample(x, uniforms_B=u, scales_B=s, greedy_B=g)[1],
            logits, uniforms, scales, greedy, seed=seed,
        )  # fmt: skip
        drawn, _ = kernels.sample(logits, greedy_B=None, **asked)
        sums = wide.exp().cumsum(1)
        above, below = (sums.gather(1, (drawn[:, None] + by).clamp_min(0))[:, 0] for by in (0, -1))
        assert bool((above >= uniforms - 1e-5).all())
        assert bool(((below <= uniforms + 1e-5) | (drawn == 0)).all())

    law()


def test_another_dtype_is_refused_by_name(kernels: InvariantKernels) -> None:
    with pytest.raises(ModelError, match=r"for float32 on a CPU, not torch\.bfloat16 on cpu"):
        kernels.linear(torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(8, 8))
