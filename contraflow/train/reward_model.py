"""Training a reward model from preferences, and making its folder as a recipe says.

Takes pairs of token ids, moves a decoder and its scalar head by the Bradley-Terry loss, tells of held-out accuracy;
`make_reward_model` reads or makes the pairs and writes the folder. Reproducible from its seed.
Shape letters: P pairs.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import torch
from torch import Tensor

from contraflow import config
from contraflow.algo.estimates import Interval, intervals
from contraflow.algo.preference import bradley_terry_loss
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError, TrainingError
from contraflow.model.builtin import model_folder
from contraflow.model.folder import copy_companions, load_folder
from contraflow.model.reward import RewardModel, Scale, save_reward_model
from contraflow.model.tokenizer import Tokenizer
from contraflow.model.value import ValueHead
from contraflow.parallel.devices import DTYPES, check_device, device_of, enter_device, visible_gpus
from contraflow.train.optimizer import Optimizer
from contraflow.train.preferences import (
    Pair,
    Pairs,
    Preference,
    encode_pairs,
    make_preferences,
    read_preferences,
)


class Look(msgspec.Struct, frozen=True):
    """Updates done, mean loss of a pair since the last look, and the share of held-out pairs in the right order."""

    update: int
    loss: float
    accuracy: Interval
    scale: Scale  # of held-out rewards


def train_reward_model(
    model: RewardModel, pairs: Sequence[Pair], held_out: Sequence[Pair], section: config.RewardTraining
) -> Iterator[Look]:
    """Train in place; a `Look` every `look_every` updates and at the end. The order is drawn from (seed, pass).

    Raises: ConfigError when there is nothing to learn or to look at, TrainingError when a loss is not finite.
    """
    if not pairs or not held_out:
        raise ConfigError(f"{len(pairs)} pairs to learn from and {len(held_out)} to look at: at least 1 of each")
    optimizer, losses = Optimizer(model, section), list[float]()
    updates = section.passes * -(-len(pairs) // section.pairs_per_update)
    for number in range(section.passes):
        order = np.random.default_rng([section.seed % 2**64, number]).permutation(len(pairs)).tolist()
        for chosen in _chunks(order, section):
            losses.append(_update(model, optimizer, [pairs[index] for index in chosen], section))
            if optimizer.updates % section.look_every == 0 or optimizer.updates == updates:
                yield _look(model, held_out, section, optimizer.updates, sum(losses) / len(losses))
                losses = []


def _chunks(order: list[int], section: config.RewardTraining) -> Iterator[list[int]]:
    size = section.pairs_per_update
    yield from (order[start : start + size] for start in range(0, len(order), size))


def _update(model: RewardModel, optimizer: Optimizer, pairs: Sequence[Pair], section: config.RewardTraining) -> float:
    """One update by the mean loss of `pairs`, in as many passes as the budget of tokens asks for."""
    optimizer.clear()
    total = 0.0
    for some in _batches(pairs, section.tokens_per_batch):
        chosen_P, rejected_P = _scores(model, some)
        margin_P = torch.tensor([pair.margin for pair in some], device=chosen_P.device)
        loss = bradley_terry_loss(chosen_P, rejected_P, margin_P).sum() / len(pairs)
        loss.backward()
        total += float(loss.detach())
    if not np.isfinite(total):
        raise TrainingError(f"the loss of update {optimizer.updates + 1} is {total}; lower reward_model.learning_rate")
    optimizer.apply()
    return total


def _scores(model: RewardModel, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    scores = model([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])
    return scores[: len(pairs)], scores[len(pairs) :]


def _batches(pairs: Sequence[Pair], budget: int) -> Iterator[list[Pair]]:
    """In order, each within the budget; a pair longer than that is alone."""
    some, tokens = list[Pair](), 0
    for pair in pairs:
        size = len(pair.chosen) + len(pair.rejected)
        if some and tokens + size > budget:
            yield some
            some, tokens = [], 0
        some.append(pair)
        tokens += size
    yield some


@torch.no_grad()
def score_pairs(
    model: RewardModel, pairs: Sequence[Pair], budget: int
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Rewards of chosen and rejected, float64 `[P, 2]`, as the head gives them."""
    found = [torch.stack(_scores(model, some), 1).cpu().double() for some in _batches(pairs, budget)]
    scores: np.ndarray[tuple[int, int], np.dtype[np.float64]] = torch.cat(found).numpy()
    return scores


def _look(
    model: RewardModel, held_out: Sequence[Pair], section: config.RewardTraining, update: int, loss: float
) -> Look:
    scores_P2 = score_pairs(model, held_out, section.tokens_per_batch)
    right_P1 = (scores_P2[:, :1] > scores_P2[:, 1:]).astype(np.float64)
    accuracy = intervals(right_P1, seed=section.seed)[0]
    return Look(update, loss, accuracy, Scale(mean=float(scores_P2.mean()), std=float(scores_P2.std())))


def preferences_of(recipe: config.RewardRecipe) -> tuple[list[Preference], list[Preference]]:
    """Rows to learn from and rows to look at. Raises: ConfigError."""
    section = recipe.preferences
    if not section.file:
        env, seed = make_env(recipe.env.name, recipe.env.options), recipe.reward_model.seed
        made = make_preferences(section, env, seed, split="train")
        looked_at = make_preferences(section, env, seed, split="test")
        return list(itertools.islice(made, section.pairs)), list(itertools.islice(looked_at, section.held_out))
    if section.held_out_file:
        looked_at = read_preferences(Path(section.held_out_file), most=section.held_out)
        return list(read_preferences(Path(section.file), most=section.pairs)), list(looked_at)
    rows = list(read_preferences(Path(section.file), most=section.pairs + section.held_out))
    cut = len(rows) - min(section.held_out, len(rows) - 1)
    return rows[:cut], rows[cut:]


def make_reward_model(recipe: config.RewardRecipe, folder: Path) -> Iterator[str]:
    """Make a reward model as the recipe says and write it to `folder`, a new one; tells of it line by line.

    Raises: ConfigError, ModelError, TrainingError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; a reward model wants a folder of its own")
    section, start = recipe.reward_model, model_folder(recipe.model.folder)
    check_device("reward_model.device", section.device, ranks=1, visible=visible_gpus(section.device))
    device = device_of(section.device)
    enter_device(device)
    tokenizer = Tokenizer.load(start)
    pairs, held_out = (encode_pairs(rows, recipe.preferences, tokenizer) for rows in preferences_of(recipe))
    yield f"{len(pairs.pairs):,} pairs, {len(held_out.pairs):,} held out"
    yield from filter(None, [pairs.told(), _held_out_told(held_out)])
    decoder = load_folder(start, device=device, compute_dtype=DTYPES[section.compute])
    model = RewardModel(decoder, ValueHead(decoder.config.dim, device=device))
    for look in train_reward_model(model, pairs.pairs, held_out.pairs, section):
        yield f"update {look.update:5d}   loss {look.loss:.4f}   held-out pair accuracy {look.accuracy.told()}"
    if look.scale.std == 0:
        raise TrainingError("all held-out answers earn the same: nothing was learned; see reward_model.learning_rate")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        draft = Path(name) / folder.name
        save_reward_model(model, look.scale, draft)
        copy_companions(start, draft)
        draft.rename(folder)
    yield f"wrote {folder}: rewards of held-out answers have mean {look.scale.mean:.3f}, spread {look.scale.std:.3f}"


def _held_out_told(held_out: Pairs) -> str:
    told = held_out.told()
    return f"held out: {told}" if told else ""
