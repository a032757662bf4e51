"""Groups made from plain numbers, and tiny models: random but seeded, so a test says only what it is about."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from contraflow.model.decoder import Decoder, new_decoder
from contraflow.model.families import ModelConfig
from contraflow.model.folder import save_folder
from contraflow.model.tokenizer import build_char_tokenizer
from contraflow.types import Chosen, Episode, Group, Span, StopReason, Task, Ticket, Turn, Version

MakeEpisode = Callable[..., Episode]
MakeGroup = Callable[..., Group]


def _episode(
    length: int,
    *,
    prompt: int = 2,
    reward: float = 0.0,
    seed: int = 0,
    vocab: int = 32,
    versions: Sequence[int] = (0,),
    line: int = 1,
    error: str = "",
) -> Episode:
    """`length` tokens, the first `prompt` of them given; the rest sampled by `versions` in equal shares."""
    rng = np.random.default_rng(seed)
    trained = np.arange(length) >= prompt
    cuts = np.linspace(min(prompt, length), length, len(versions) + 1).astype(int).tolist()
    return Episode(
        seed=seed,
        tokens=rng.integers(0, vocab, length, dtype=np.int32),
        trained=trained,
        logprobs=np.where(trained, -rng.random(length) * 4 - 0.1, 0).astype(np.float32),
        spans=tuple(Span(Version(line, n), a, b) for n, a, b in zip(versions, cuts[:-1], cuts[1:], strict=True)),
        turns=(Turn("prompt", 0, prompt), Turn("model", prompt, length)),
        stop=StopReason.STOP,
        reward=reward,
        parts={"correct": reward},
        error=error,
    )


def _group(episodes: Sequence[Episode], *, index: int = 0, attempt: int = 1, line: int = 1) -> Group:
    ticket = Ticket(group=index, attempt=attempt, line=line)
    task = Task(key=f"train/{index}", prompt="1+1=", reference="2")
    return Group(ticket=ticket, task=task, episodes=tuple(episodes))


@pytest.fixture
def make_episode() -> MakeEpisode:
    return _episode


@pytest.fixture
def make_group() -> MakeGroup:
    return _group


@pytest.fixture
def choose() -> Callable[[Sequence[Group]], list[Chosen]]:
    """What the window says when nothing is too old."""
    return lambda groups: [Chosen(g.ticket.group, g.ticket.attempt, Version(0, 0)) for g in groups]


MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
DENSE = {k: v for k, v in MIXTURE.items() if "expert" not in k and k != "norm_topk_prob"} | {"model_type": "qwen3"}


@pytest.fixture(params=["mixture", "dense"])
def any_decoder(request: pytest.FixtureRequest) -> Decoder:
    """A tiny decoder of each kind, weights large enough for every gradient to matter."""
    return new_decoder(ModelConfig.from_hf(MIXTURE if request.param == "mixture" else DENSE), seed=1, std=0.2)


@pytest.fixture
def mixture() -> Decoder:
    """A tiny mixture of experts."""
    return new_decoder(ModelConfig.from_hf(MIXTURE), seed=1, std=0.2)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A whole model folder: 40 tokens of vocabulary, one per character."""
    folder = tmp_path / "start"
    tokenizer = build_char_tokenizer(folder, "0123456789+-=()abcdefghijklmnopqrs ")
    tree = MIXTURE | {"vocab_size": tokenizer.size, "eos_token_id": tokenizer.eos}
    save_folder(new_decoder(ModelConfig.from_hf(tree), seed=2, std=0.1), folder)
    return folder
