"""Supervised training: cross-entropy on what the model should have said, until a held-out accuracy is reached.

Takes a decoder and conversations, moves the weights, tells of it at every look; `make_model` does that for a recipe and
writes the model folder. Reproducible from its seed. Does not sample: accuracy needs one forward pass (see `accuracy`).
Shape letters: N trained tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import torch

from contraflow import config
from contraflow.envs.base import Env, Split
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError, ModelError
from contraflow.model.builtin import model_folder
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import copy_companions, load_folder, save_folder
from contraflow.model.tokenizer import ALPHABET, Tokenizer, build_char_tokenizer
from contraflow.rewards.base import Said
from contraflow.telemetry import Account, Clock
from contraflow.train.batcher import pack
from contraflow.train.forward import feed
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Sample, Task

Example = Sequence[Said]  # a whole conversation; the model's turns are learned, each with an end token


class Look(msgspec.Struct, frozen=True):
    """Where supervised training stands: updates done, mean loss per token since the last look, held-out accuracy."""

    update: int
    loss: float
    accuracy: float  # -1 when there is nothing held out
    tokens: int  # trained so far


def sft(
    decoder: Decoder,
    examples: Sequence[Sample],
    section: config.Sft,
    account: Account,
    *,
    held_out: Sequence[Sample] = (),
) -> Iterator[Look]:
    """Train `decoder` in place; gives a `Look` every `look_every` updates and at the end, stops at the wanted accuracy.

    Samples come from `encode`. Every update takes the next examples of a fresh shuffle per pass, drawn from
    (seed, pass). Raises TrainingError when a loss is not finite, ConfigError when there is nothing to learn from.
    """
    if not examples:
        raise ConfigError("supervised training needs at least one example")
    optimizer = Optimizer(decoder, section)
    updater = Updater(decoder, optimizer, account, balance_weight=section.balance_weight)
    losses, tokens = list[float](), 0
    for chosen in _rounds(examples, section):
        batches = pack(chosen, tokens_per_batch=section.tokens_per_batch, reduction="token")
        done = updater.update(
            batches,
            lambda batch, _, scored: (
                -(torch.from_numpy(batch.weights[batch.mask]).to(updater.device) * scored.logprobs_N).sum()
            ),
        )
        losses.append(done.loss - section.balance_weight * done.balance)
        tokens += sum(int(np.count_nonzero(batch.mask)) for batch in batches)
        if optimizer.updates % section.look_every == 0 or optimizer.updates == section.updates:
            with account.charge("look"):
                found = accuracy(decoder, held_out, section.tokens_per_batch) if held_out else -1.0
            yield Look(optimizer.updates, sum(losses) / len(losses), found, tokens)
            losses = []
            if found >= section.stop_at_accuracy:
                return


@torch.no_grad()
def accuracy(decoder: Decoder, samples: Sequence[Sample], tokens_per_batch: int) -> float:
    """Share of the samples that greedy decoding would answer word for word.

    Greedy decoding says exactly the reference if and only if, fed the reference, every learned token is the likeliest:
    one forward pass, no generation. Where a task has several right answers this is a lower bound.
    """
    right = 0
    for batch in pack(samples, tokens_per_batch=tokens_per_batch, reduction="token"):
        fed = feed(batch, decoder.head.device)
        hidden_FD = decoder(fed.tokens_F, fed.positions_F, fed.plan)
        best_N = decoder.logits(hidden_FD.index_select(0, fed.rows_N)).argmax(-1)
        hits = np.ones(batch.tokens.size, np.bool_)
        hits[batch.mask] = (best_N == fed.targets_N).cpu().numpy()
        right += int(np.logical_and.reduceat(hits, batch.starts[:-1]).sum())
    return right / len(samples) if samples else 0.0


def encode(example: Example, tokenizer: Tokenizer) -> Sample:
    """A conversation as tokens, exactly as an episode would hold it: each turn of the model ends with the end token.

    Raises ModelError when the tokenizer cannot write it.
    """
    tokens, mask = list[int](), list[bool]()
    for said in example:
        ids = tokenizer.encode(said.text, special=said.role == "prompt")
        ids += [tokenizer.eos] if said.role == "model" else []
        tokens += ids
        mask += [said.role == "model"] * len(ids)
    if not any(mask[1:]) or mask[0]:
        raise ModelError(f"example {list(example)!r} must begin with a prompt and hold something for the model to say")
    length = len(tokens)
    return Sample(
        tokens=np.array(tokens, np.int32),
        mask=np.array(mask, np.bool_),
        behaviour=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
    )


def answered(task: Task) -> Example:
    """A task with its reference as the model's answer."""
    return (Said("prompt", task.prompt), Said("model", task.reference))


def make_model(recipe: config.SftRecipe, folder: Path, *, clock: Clock) -> Iterator[str]:
    """Make a model as the recipe says and write it to `folder`, a new Hugging Face folder; tells of it line by line.

    The folder appears when the model is whole. Raises ConfigError when it is in use or a part of the recipe does not
    fit, ModelError, TrainingError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; a new model wants a folder of its own")
    env = make_env(recipe.env.name, recipe.env.options)
    looked_at = env if recipe.look is None else make_env(recipe.look.name, recipe.look.options)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        draft = Path(name) / folder.name
        yield from _make(recipe, draft, env, looked_at, Account(clock, "batch"))
        draft.rename(folder)
    yield f"wrote {folder}"


def _make(recipe: config.SftRecipe, draft: Path, env: Env, looked_at: Env, account: Account) -> Iterator[str]:
    tokenizer = _tokenizer(recipe.model, draft)
    decoder = _start(recipe.model, tokenizer, recipe.sft.seed)
    examples = _samples(env, "train", recipe.sft.examples, tokenizer)
    held_out = _samples(looked_at, "test", recipe.sft.held_out, tokenizer)
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    yield f"{parameters:,} parameters, {len(examples):,} examples, {len(held_out):,} held out"
    for look in sft(decoder, examples, recipe.sft, account, held_out=held_out):
        found = f"   held-out {look.accuracy:.3f}" if held_out else ""
        seconds = sum(account.seconds().values())
        yield f"update {look.update:5d}   loss {look.loss:.4f}{found}   {look.tokens:,} tokens   {seconds:.1f} s"
    save_folder(decoder, draft)


def _rounds(examples: Sequence[Sample], section: config.Sft) -> Iterator[list[Sample]]:
    """`section.updates` handfuls of examples, pass after pass."""
    queue, passes = list[int](), 0
    for _ in range(section.updates):
        while len(queue) < section.examples_per_update:
            queue += np.random.default_rng([section.seed % 2**64, passes]).permutation(len(examples)).tolist()
            passes += 1
        chosen, queue = queue[: section.examples_per_update], queue[section.examples_per_update :]
        yield [examples[index] for index in chosen]


def _samples(env: Env, split: Split, count: int, tokenizer: Tokenizer) -> list[Sample]:
    return [encode(answered(env.task(split, index)), tokenizer) for index in range(count)]


def _tokenizer(model: config.NewModel, folder: Path) -> Tokenizer:
    if not model.folder:
        return build_char_tokenizer(folder, model.alphabet or ALPHABET)
    start = model_folder(model.folder)
    folder.mkdir()
    copy_companions(start, folder)
    return Tokenizer.load(folder)


def _start(model: config.NewModel, tokenizer: Tokenizer, seed: int) -> Decoder:
    if model.folder:
        return load_folder(model_folder(model.folder))
    tree = {"vocab_size": tokenizer.size, "eos_token_id": tokenizer.eos, **model.config}
    return new_decoder(ModelConfig.from_hf(tree), seed=seed)
