import numpy as np
import pytest
import torch

from contraflow.model.attention import PackedPlan
from contraflow.train.batcher import pack
from contraflow.train.forward import Reading, feed, score
from contraflow.types import Sample


def samples(lengths, *, seed=0, vocab=32):
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        zeros = np.zeros(length, np.float32)
        tokens = rng.integers(0, vocab, length, dtype=np.int32)
        made.append(
            Sample(tokens=tokens, mask=mask, behaviour=zeros, advantages=zeros, versions=zeros.astype(np.int32))
        )
    return made


def one_by_one(decoder, sample, temperature):
    """The plain definition: the whole sequence alone, the whole vocabulary, in float64 from the logits on."""
    tokens_L = torch.from_numpy(sample.tokens.astype(np.int64))
    hidden_LD = decoder(tokens_L, torch.arange(len(tokens_L)), PackedPlan([0, len(tokens_L)]))
    log_LV = torch.log_softmax(decoder.logits(hidden_LD).double() / temperature, -1)
    at = np.flatnonzero(sample.mask)
    logprobs = log_LV[at - 1, tokens_L[at]]
    entropy = -(log_LV.exp() * log_LV).sum(-1)[at - 1]
    return logprobs, entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("lengths", [[2], [2, 2, 2], [9, 3, 14, 2, 7]])
def test_trained_tokens_get_the_logprobs_of_their_sequence_alone(any_decoder, lengths, temperature):
    made = samples(lengths)
    (batch,) = pack(made, tokens_per_batch=1000, reduction="token")
    order = sorted(range(len(made)), key=lambda i: -made[i].tokens.size)
    expected = [one_by_one(any_decoder, made[i], temperature) for i in order]
    fed = feed(batch, torch.device("cpu"))
    logprobs_N, entropy_N, _ = score(any_decoder, fed, Reading(temperature))
    torch.testing.assert_close(logprobs_N.double(), torch.cat([e[0] for e in expected]), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy_N.double(), torch.cat([e[1] for e in expected]), atol=2e-5, rtol=0)


def test_the_last_token_of_a_sequence_is_never_fed():
    (batch,) = pack(samples([4, 3]), tokens_per_batch=100, reduction="token")
    fed = feed(batch, torch.device("cpu"))
    assert fed.tokens_F.tolist() == batch.tokens[[0, 1, 2, 4, 5]].tolist()
    assert fed.positions_F.tolist() == [0, 1, 2, 0, 1]
