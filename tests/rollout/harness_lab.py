"""What the harness' tests share: a model's words with a chat template, an engine that notes what it is fed, a desk."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from contraflow.config import Rollout
from contraflow.envs.draws import Draws
from contraflow.envs.registry import make_env
from contraflow.model.tokenizer import Tokenizer
from contraflow.rewards.registry import make_mix
from contraflow.rollout.draft import Draft
from contraflow.rollout.episode import Limits, Stage, play
from contraflow.rollout.guard import make_guard
from contraflow.rollout.harness import Table
from contraflow.rollout.http import HttpClient
from contraflow.rollout.open_table import open_table
from contraflow.rollout.scripted import ScriptedEngine
from contraflow.types import Completion, Episode, Request, Version

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def word_folder(folder: Path, template: str = CHATML) -> Path:
    """A byte-level BPE tokenizer with merges, so that text tokenized again may well become other tokens."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend: Any = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(
        ["the theatre of the other weather\n\n there, then", "user\nassistant\nsystem\n"], trainer
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Notes:
    """An engine of random tokens that remembers what it was fed and what it sampled."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        seed: int,
        context_tokens: int,
        shortest: int = 0,
        answer: Callable[[Request], list[int]] | None = None,
    ) -> None:
        self.tokenizer, self.seed, self.shortest = tokenizer, seed, shortest
        self.fed: list[Request] = []
        self.gave: list[Completion] = []
        twin = ScriptedEngine(
            answer or self.answer,
            vocab=tokenizer.size,
            clock=time.monotonic,
            context_tokens=context_tokens,
            version=Version(1, 0),
        )
        self.engine: Any = twin
        generate = twin.generate

        async def noted(request: Request) -> Completion:
            self.fed.append(request)
            completion = await generate(request)
            self.gave.append(completion)
            return completion

        twin.generate = noted  # type: ignore[method-assign]

    def answer(self, request: Request) -> list[int]:
        draws = Draws(self.seed, "answer", request.seed)
        length = self.shortest + draws.below(6)
        ids = [draws.below(self.tokenizer.size) for _ in range(length)]
        return [*(i for i in ids if i != self.tokenizer.eos), self.tokenizer.eos]


class Lab:
    """One table, and the stage it belongs to."""

    def __init__(self, folder: Path, run_folder: Path, *, options: dict[str, Any], **settings: Any) -> None:
        self.tokenizer = Tokenizer.load(folder)
        limits = {"max_new_tokens": 200, "max_turns": 8, "context_tokens": 512, **settings.pop("limits", {})}
        self.notes = Notes(
            self.tokenizer,
            seed=settings.pop("seed", 0),
            context_tokens=limits["context_tokens"],
            shortest=1,
            answer=settings.pop("answer", None),
        )
        deadline_s = settings.pop("deadline_s", 5.0)
        self.env: Any = make_env(settings.pop("name", "harness"), options)
        mix = make_mix(settings.pop("parts", {"score": 1.0}))
        guard = make_guard(self.env, mix, deadline_s=deadline_s, context_tokens=limits["context_tokens"])
        self.sign = run_folder / "sessions-rollout-0.url"
        table = open_table(self.env, folder, rollout=Rollout(), deadline_s=deadline_s, sign=self.sign)
        assert table is not None
        self.table: Table = table
        self.stage = Stage(
            engine=self.notes.engine,
            tokenizer=self.tokenizer,
            guard=guard,
            limits=Limits(temperature=1.0, routes=False, **limits),
            table=self.table,
        )

    async def play(self, *, seed: int = 1, index: int = 0, draft: Draft | None = None) -> Episode:
        task = await self.stage.guard.task("train", index)
        return await play(task, self.stage, draft or Draft(seed), key=f"1.{index}.1/0", group=f"1.{index}.1")

    async def meet(self, *, wait_s: float = 5.0, key: str = "") -> tuple[HttpClient, str, dict[str, Any]]:
        """Fetch an episode as a program would: a client, the path of its session, the invitation."""
        await self.table.open()
        client = HttpClient(self.table.desk.url, key=key, deadline_s=10.0)
        invitation = await client.post("/sessions", {"wait_s": wait_s})
        return client, invitation["base_url"].removeprefix(client.url), invitation

    def run(self, harness: Callable[..., Awaitable[None]] | None = None, **rest: Any) -> Episode:
        """Play one episode while `harness(client, path)` is the program."""

        async def main() -> Episode:
            async with asyncio.timeout(30):
                playing = asyncio.create_task(self.play(**rest))
                try:
                    if harness is not None:
                        client, path, _ = await self.meet()
                        await harness(client, path)
                    return await playing
                finally:
                    await self.table.close()
                    self.stage.guard.close()

        return asyncio.run(main())

    def assert_exact(self, episode: Episode) -> None:
        """Every token is one that the engine was fed or sampled, in that order, and only sampled ones are trained."""
        turns = [(f, g) for f, g in zip(self.notes.fed, self.notes.gave, strict=True) if "branch" not in f.id]
        for fed, gave in turns:
            end = len(fed.prompt)
            np.testing.assert_array_equal(episode.tokens[:end], fed.prompt)
            np.testing.assert_array_equal(episode.tokens[end : end + len(gave.tokens)], gave.tokens)
            np.testing.assert_array_equal(episode.logprobs[end : end + len(gave.tokens)], gave.logprobs)
            assert episode.trained[end : end + len(gave.tokens)].all()
        assert episode.trained.sum() == sum(len(gave.tokens) for _, gave in turns)
        assert len(episode.tokens) == len(turns[-1][0].prompt) + len(turns[-1][1].tokens)
