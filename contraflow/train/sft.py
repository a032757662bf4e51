"""Supervised training: cross-entropy on what the model should have said, until a held-out accuracy is reached.

Takes a decoder and samples, moves the weights, tells of it at every look; `make_model` does that for a recipe, with an
environment's answers or rows of a file, and writes the model folder. Reproducible from its seed. Does not sample.
Shape letters: F fed tokens, N trained ones, C of these at a time, D width.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from contraflow import config
from contraflow.envs.base import Env, Split
from contraflow.envs.registry import make_env
from contraflow.errors import ConfigError, ModelError
from contraflow.model.builtin import model_folder
from contraflow.model.chat import ChatTemplate
from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import copy_companions, load_folder, save_folder
from contraflow.model.tokenizer import ALPHABET, Tokenizer, build_char_tokenizer
from contraflow.parallel.devices import DTYPES, check_device, device_of, enter_device, visible_gpus
from contraflow.rewards.base import Said
from contraflow.telemetry import Account, Clock
from contraflow.train.batcher import pack
from contraflow.train.chat import Rows, read_rows, sample_of
from contraflow.train.forward import Reading, feed, score_hidden
from contraflow.train.optimizer import Optimizer
from contraflow.train.update import Updater
from contraflow.types import Sample, Task

LOOKED_AT = 1024  # tokens whose logits are held at once
Example = Sequence[Said]  # a whole conversation; the model's turns are learned, each with an end token


class HeldOut(NamedTuple):
    """What held-out samples say: share answered word for word by greedy decoding, mean loss of a learned token."""

    accuracy: float
    loss: float


class Look(msgspec.Struct, frozen=True):
    """Where supervised training stands: updates done, mean loss per token since the last look, what is held out."""

    update: int
    loss: float
    held_out: HeldOut | None  # None when nothing is
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
    updates = planned(len(examples), section)
    for chosen in _rounds(examples, section, updates):
        batches = pack(chosen, tokens_per_batch=section.tokens_per_batch, reduction="token")
        done = updater.update(
            batches,
            lambda batch, _, scored: (
                -(torch.from_numpy(batch.weights[batch.mask]).to(updater.device) * scored.logprobs_N).sum()
            ),
        )
        losses.append(done.loss - section.balance_weight * done.balance)
        tokens += sum(int(np.count_nonzero(batch.mask)) for batch in batches)
        if optimizer.updates % section.look_every == 0 or optimizer.updates == updates:
            with account.charge("look"):
                found = look_at(decoder, held_out, section.tokens_per_batch) if held_out else None
            yield Look(optimizer.updates, sum(losses) / len(losses), found, tokens)
            losses = []
            if found and found.accuracy >= section.stop_at_accuracy:
                return


@torch.no_grad()
def look_at(decoder: Decoder, samples: Sequence[Sample], tokens_per_batch: int) -> HeldOut:
    """How well held-out samples are known; 0 of none.

    Greedy decoding says exactly the reference if and only if, fed the reference, every learned token is the likeliest:
    one forward pass, no generation. Where a task has several right answers the accuracy is a lower bound.
    """
    right, loss, learned = 0, 0.0, 0
    for batch in pack(samples, tokens_per_batch=tokens_per_batch, reduction="token"):
        fed = feed(batch, decoder.head.device)
        hidden_FD = decoder(fed.tokens_F, fed.positions_F, fed.plan)
        chunks = hidden_FD.index_select(0, fed.rows_N).split(LOOKED_AT)
        hits = np.ones(batch.tokens.size, np.bool_)
        likeliest_N = torch.cat([decoder.logits(hidden_CD).argmax(-1) for hidden_CD in chunks])
        hits[batch.mask] = (likeliest_N == fed.targets_N).cpu().numpy()
        right += int(np.logical_and.reduceat(hits, batch.starts[:-1]).sum())
        loss -= float(score_hidden(hidden_FD, decoder, fed, Reading()).logprobs_N.double().sum())
        learned += len(fed.targets_N)
    return HeldOut(right / len(samples), loss / learned) if samples else HeldOut(0.0, 0.0)


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
    return sample_of(tokens, mask)


def answered(task: Task) -> Example:
    """A task with its reference as the model's answer."""
    return (Said("prompt", task.prompt), Said("model", task.reference))


def make_model(recipe: config.SftRecipe, folder: Path, *, clock: Clock) -> Iterator[str]:
    """Make a model as the recipe says and write it to `folder`, a new Hugging Face folder; tells of it line by line.

    The folder appears when the model is whole; with `sft.save_every`, FOLDER.update-N beside it holds the last copy
    made on the way. Raises: ConfigError (in use, or a part of the recipe does not fit), ModelError, TrainingError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; a new model wants a folder of its own")
    device = recipe.sft.device
    check_device("sft.device", device, ranks=1, visible=visible_gpus(device))
    enter_device(device_of(device))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        draft = Path(name) / folder.name
        yield from _make(recipe, draft, folder, Account(clock, "batch"))
        draft.rename(folder)
    yield f"wrote {folder}"


def _make(recipe: config.SftRecipe, draft: Path, folder: Path, account: Account) -> Iterator[str]:
    sources = _Sources(recipe)
    tokenizer = _tokenizer(recipe.model, draft)
    examples, held_out, told = sources.samples(tokenizer)
    decoder = _start(recipe, tokenizer)
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    counted = f"{parameters:,} parameters, {len(examples):,} examples, {len(held_out):,} held out"
    yield ", ".join(filter(None, [counted, told]))
    saved, section = 0, recipe.sft
    for look in sft(decoder, examples, section, account, held_out=held_out):
        found = f"   held-out {look.held_out.accuracy:.3f} loss {look.held_out.loss:.4f}" if look.held_out else ""
        seconds = sum(account.seconds().values())
        yield f"update {look.update:5d}   loss {look.loss:.4f}{found}   {look.tokens:,} tokens   {seconds:.1f} s"
        if section.save_every and look.update // section.save_every > saved // section.save_every:
            with account.charge("save"):
                _save_aside(decoder, draft, folder, look.update)
            saved = look.update
    save_folder(decoder, draft)


def _save_aside(decoder: Decoder, draft: Path, folder: Path, update: int) -> None:
    """FOLDER.update-N, whole or not at all, in place of an older one. Weights only: moments begin anew from it."""
    older = list(folder.parent.glob(f"{folder.name}.update-*"))
    part = draft.with_name(f"{draft.name}-part")
    save_folder(decoder, part)
    copy_companions(draft, part)
    part.rename(folder.with_name(f"{folder.name}.update-{update}"))
    for old in older:
        shutil.rmtree(old)


class _Sources:
    """Where a recipe's samples come from. Environments are opened at once, so that a wrong name is refused first."""

    def __init__(self, recipe: config.SftRecipe) -> None:
        self._recipe, chat = recipe, recipe.chat
        self._env = None if chat.file else make_env(recipe.env.name, recipe.env.options)
        self._looked_at = self._env if recipe.look is None else make_env(recipe.look.name, recipe.look.options)

    def samples(self, tokenizer: Tokenizer) -> tuple[list[Sample], list[Sample], str]:
        """Samples to learn, samples to look at, and what there is to tell about them."""
        section, told = self._recipe.sft, ""
        if self._env is None:
            examples, held_out, told = self._rows(tokenizer)
        else:
            examples, held_out = _samples(self._env, "train", section.examples, tokenizer), []
        if self._looked_at is not None:
            held_out = _samples(self._looked_at, "test", section.held_out, tokenizer)
        return examples, held_out, told

    def _rows(self, tokenizer: Tokenizer) -> tuple[list[Sample], list[Sample], str]:
        chat, section = self._recipe.chat, self._recipe.sft
        folder = model_folder(self._recipe.model.folder)

        def read(file: str, most: int) -> Rows:
            return read_rows(Path(file), chat, tokenizer, lambda: ChatTemplate.load(folder), most=most)

        if chat.held_out_file:
            rows, looked_at = read(chat.file, section.examples), read(chat.held_out_file, section.held_out).samples
            return rows.samples, looked_at, rows.told()
        rows = read(chat.file, section.examples + section.held_out)
        own = 0 if self._recipe.look else min(section.held_out, len(rows.samples) - 1)
        cut = len(rows.samples) - max(own, 0)
        return rows.samples[:cut], rows.samples[cut:], rows.told()


def planned(examples: int, section: config.Sft) -> int:
    """Updates at most: `section.updates`, or fewer when `section.passes` over the examples are done before."""
    whole = -(-section.passes * examples // section.examples_per_update)
    return min(section.updates, whole) if section.passes else section.updates


def _rounds(examples: Sequence[Sample], section: config.Sft, updates: int) -> Iterator[list[Sample]]:
    """So many handfuls of examples, pass after pass; the last one may be smaller when passes are counted."""
    left = section.passes * len(examples) if section.passes else updates * section.examples_per_update
    queue, passes = list[int](), 0
    for _ in range(updates):
        size = min(section.examples_per_update, left)
        while len(queue) < size:
            queue += np.random.default_rng([section.seed % 2**64, passes]).permutation(len(examples)).tolist()
            passes += 1
        chosen, queue, left = queue[:size], queue[size:], left - size
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


def _start(recipe: config.SftRecipe, tokenizer: Tokenizer) -> Decoder:
    model, section = recipe.model, recipe.sft
    device, compute = device_of(section.device), DTYPES[section.compute]
    if model.folder:
        return load_folder(model_folder(model.folder), device=device, compute_dtype=compute)
    tree = {"vocab_size": tokenizer.size, "eos_token_id": tokenizer.eos, **model.config}
    decoder = new_decoder(ModelConfig.from_hf(tree), seed=section.seed, device=device)
    decoder.compute_dtype = compute
    return decoder
