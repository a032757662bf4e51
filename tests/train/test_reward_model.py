import numpy as np
import pytest
import torch

from contraflow import config
from contraflow.errors import ConfigError, ModelError, TrainingError
from contraflow.model.attention import PackedPlan
from contraflow.model.decoder import new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.reward import RewardModel, Scale, digest_of, load_reward_model, save_reward_model
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.model.value import ValueHead
from contraflow.train.reward_model import Pair, make_reward_model, score_pairs, train_reward_model

SHAPE = {
    "model_type": "qwen3_moe",
    "vocab_size": 22,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}


def fresh(seed=0):
    decoder = new_decoder(ModelConfig.from_hf(SHAPE), seed=seed, std=0.3)
    head = ValueHead(16)
    with torch.no_grad():
        head.weight.copy_(torch.randn(16, generator=torch.Generator().manual_seed(seed)))
    return RewardModel(decoder, head)


def separable(count, seed=0):
    """Chosen answers end with token 5, rejected ones with 6; what comes before says nothing."""
    rng = np.random.default_rng(seed)
    starts = [rng.integers(7, 20, rng.integers(1, 9)).tolist() for _ in range(count)]
    return [Pair([*start, 5, 1], [*start, 6, 1], 0.0) for start in starts]


def section(**fields):
    return config.RewardTraining(**{"pairs_per_update": 16, "passes": 4, "learning_rate": 1e-2} | fields)


def test_separable_pairs_are_told_apart_and_the_accuracy_has_an_interval():
    looks = list(train_reward_model(fresh(), separable(128), separable(64, seed=1), section(look_every=8)))
    assert [look.update for look in looks] == [8, 16, 24, 32]
    last = looks[-1]
    assert last.accuracy.low <= last.accuracy.mean <= last.accuracy.high
    assert last.accuracy.mean >= 0.98
    assert looks[0].loss > last.loss


def test_the_scale_is_mean_and_spread_of_held_out_rewards():
    model, held_out = fresh(), separable(32, seed=1)
    *_, look = train_reward_model(model, separable(32), held_out, section(passes=1))
    scores = score_pairs(model, held_out, 8192)
    assert look.scale == Scale(mean=float(scores.mean()), std=float(scores.std()))


def test_training_repeats_bit_for_bit():
    models = [fresh() for _ in range(2)]
    for model in models:
        list(train_reward_model(model, separable(40), separable(8, seed=1), section(passes=2)))
    ours, theirs = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_rows_give_the_same_scores_one_by_one_and_together():
    model, rng = fresh(), np.random.default_rng(3)
    rows = [rng.integers(0, 22, rng.integers(1, 30)).tolist() for _ in range(40)]
    with torch.no_grad():
        together = model(rows)
        alone = torch.cat([model([row]) for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_a_score_is_the_head_s_word_on_the_last_token_and_no_other():
    model, row = fresh(), [3, 9, 4, 11, 1]
    with torch.no_grad():
        hidden_TD = model.decoder(torch.tensor(row), torch.arange(5), PackedPlan.of([0, 5]))
        expected = hidden_TD[4].double() @ model.head.weight.double() + model.head.bias.double()
        torch.testing.assert_close(model([[7, 8], row])[1:].double(), expected, atol=1e-5, rtol=0)


def test_an_update_is_the_same_in_many_passes_as_in_one():
    models = [fresh() for _ in range(2)]
    for model, budget in zip(models, (8192, 30), strict=True):
        list(train_reward_model(model, separable(16), separable(4), section(passes=1, tokens_per_batch=budget)))
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)  # AdamW's first step divides by the gradient's size


@pytest.mark.parametrize(("pairs", "held_out"), [([], separable(1)), (separable(1), [])])
def test_nothing_to_learn_from_or_to_look_at_is_refused(pairs, held_out):
    with pytest.raises(ConfigError, match="at least 1 of each"):
        next(train_reward_model(fresh(), pairs, held_out, section()))


def test_a_loss_that_is_no_number_ends_the_training():
    model = fresh()
    with torch.no_grad():
        model.head.bias.fill_(float("nan"))
    with pytest.raises(TrainingError, match="update 1"):
        next(train_reward_model(model, separable(4), separable(4), section()))


def test_a_folder_gives_back_the_model_and_its_digest_tells_models_apart(tmp_path):
    model, scale = fresh(), Scale(mean=1.5, std=2.0)
    for name, one in (("a", model), ("b", model), ("c", fresh(seed=1))):
        save_reward_model(one, scale, tmp_path / name)
        build_char_tokenizer(tmp_path / name, "0123456789+-=[]ab")
    loaded, found = load_reward_model(tmp_path / "a")
    assert found == scale
    with torch.no_grad():
        assert torch.equal(loaded([[3, 4, 5]]), model([[3, 4, 5]]))
    assert digest_of(tmp_path / "a") == digest_of(tmp_path / "b") != digest_of(tmp_path / "c")


def test_a_folder_without_its_constants_is_no_reward_model(tmp_path):
    save_folder(fresh().decoder, tmp_path)
    with pytest.raises(ModelError, match="no reward model"):
        load_reward_model(tmp_path)
    (tmp_path / "reward.json").write_text('{"mean": 0.0, "std": 0.0}', encoding="utf-8")
    with pytest.raises(ModelError, match="std = 0"):
        load_reward_model(tmp_path)


@pytest.mark.parametrize(("value", "normal"), [(1.5, 0.0), (5.5, 2.0), (1e9, 5.0), (-1e9, -5.0)])
def test_rewards_are_spreads_from_the_mean_and_clipped(value, normal):
    assert Scale(mean=1.5, std=2.0).normal(value, 5.0) == normal


def test_a_recipe_makes_a_folder_that_is_whole_and_never_overwrites(tmp_path):
    start = tmp_path / "start"
    save_folder(fresh().decoder, start)
    build_char_tokenizer(start, "0123456789+-*=[]? ab")
    recipe = config.RewardRecipe(
        model=config.Model(folder=str(start)),
        preferences=config.Preferences(pairs=64, held_out=16),
        reward_model=config.RewardTraining(passes=1, learning_rate=1e-2),
    )
    told = list(make_reward_model(recipe, tmp_path / "made"))
    assert told[0] == "64 pairs, 16 held out"
    assert "held-out pair accuracy" in told[1]
    load_reward_model(tmp_path / "made")
    with pytest.raises(ConfigError, match="is not empty"):
        list(make_reward_model(recipe, tmp_path / "made"))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
