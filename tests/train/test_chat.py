"""Rows become samples as the chat template has them; the loss of a batch is that of transformers on the same labels."""

import json
import string
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contraflow import config
from contraflow.errors import ConfigError, ModelError
from contraflow.model.chat import ChatTemplate, Message
from contraflow.model.folder import copy_companions, load_folder
from contraflow.model.tokenizer import Tokenizer
from contraflow.telemetry import Account
from contraflow.train.chat import Rows, read_rows
from contraflow.train.sft import look_at, make_model, sft

PLAIN = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<eos>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<eos>' }}{% endgeneration %}{% else %}{{ m['content'] + '<eos>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
FORGETFUL = (  # as templates that leave earlier thoughts out
    "{% for m in messages %}{% set kept = loop.last or m['role'] != 'assistant' %}"
    "{{ m['role'] + ':' + (m['content'] if kept else 'gone') + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
WORDS = st.text(string.ascii_lowercase + " 0123456789", max_size=12)
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def folders(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny model with each of the templates."""
    made = {}
    for name, template in {"plain": PLAIN, "marked": MARKED, "forgetful": FORGETFUL}.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        copy_companions(tiny_moe, folder)
        for file in ("config.json", "model.safetensors"):
            (folder / file).write_bytes((tiny_moe / file).read_bytes())
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def templates(folders: dict[str, Path]) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate.load(folder) for name, folder in folders.items()}


def talk(turns: list[tuple[str, str]]) -> dict[str, list[dict[str, str]]]:
    roles = [{"role": role, "content": text} for pair in turns for role, text in zip(("user", "assistant"), pair)]  # noqa: B905
    return {"messages": [{"role": "system", "content": "be short"}, *roles]}


def read(folder: Path, *rows: object, most: int = 1000, template: ChatTemplate | None = None, **keys: object) -> Rows:
    file = folder / "rows.jsonl"
    file.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    section = config.Chat.model_validate(keys)
    return read_rows(file, section, Tokenizer.load(folder), lambda: template or ChatTemplate.load(folder), most=most)


def learned(rows: Rows, folder: Path) -> list[str]:
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.transcribe(sample.tokens[sample.mask].tolist()) for sample in rows.samples]


@given(TURNS)
def test_what_is_learned_is_each_answer_with_its_end_and_the_whole_is_what_the_template_writes(
    folders: dict[str, Path], templates: dict[str, ChatTemplate], turns: list[tuple[str, str]]
) -> None:
    for name in ("plain", "marked"):
        rows = read(folders[name], talk(turns), template=templates[name])
        assert learned(rows, folders[name]) == ["".join(f"{answer}<eos>" for _, answer in turns)]
        whole = templates[name].text([Message(**one) for one in talk(turns)["messages"]], ask=False)
        assert Tokenizer.load(folders[name]).transcribe(rows.samples[0].tokens.tolist()) == whole.rstrip("\n")


@given(TURNS)
def test_only_the_last_turn_is_learned_where_that_is_asked_for(
    folders: dict[str, Path], templates: dict[str, ChatTemplate], turns: list[tuple[str, str]]
) -> None:
    for name, template in templates.items():
        rows = read(folders[name], talk(turns), template=template, turns="last")
        assert learned(rows, folders[name]) == [f"{turns[-1][1]}<eos>"]


def test_the_loss_of_a_batch_is_that_of_transformers_on_the_same_labels(folders: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folders["marked"]
    talks = [[("1+2", "3"), ("and 4", "7")], [("hello", "good day")], [("", "x y z"), ("q", ""), ("a b", "c")]]
    judge, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    made = [
        judge.apply_chat_template(
            talk(turns)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        for turns in talks
    ]
    longest = max(len(one["input_ids"]) for one in made)
    ids, labels, seen = (torch.full((3, longest), fill) for fill in (0, -100, 0))
    for place, one in enumerate(made):
        tokens, mask = torch.tensor(one["input_ids"]), torch.tensor(one["assistant_masks"]).bool()
        ids[place, : len(tokens)], seen[place, : len(tokens)] = tokens, 1
        labels[place, : len(tokens)] = tokens.where(mask, torch.tensor(-100))
    with torch.no_grad():
        expected = float(model(input_ids=ids, attention_mask=seen, labels=labels).loss)
    for name in ("plain", "marked"):
        samples = read(folders[name], *(talk(turns) for turns in talks)).samples
        decoder = load_folder(folder)
        assert look_at(decoder, samples, 64).loss == pytest.approx(expected, abs=1e-5)
        settings = config.Sft(updates=1, examples_per_update=3, tokens_per_batch=64, balance_weight=0.0)
        (look,) = sft(decoder, samples, settings, Account(lambda: 0.0))
        assert look.loss == pytest.approx(expected, abs=1e-5)


def test_prompt_and_completion_are_taken_as_text_or_as_messages(folders: dict[str, Path], tmp_path: Path) -> None:
    copy_companions(folders["plain"], tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    plain = {"prompt": "1+2=", "completion": "3", "id": 7}
    assert learned(read(tmp_path, plain, {**plain, "completion": "3<eos>"}, "\n"), tmp_path) == ["3<eos>", "3<eos>"]
    messages = talk([("a", "b"), ("c", "d")])["messages"]
    for name in ("plain", "marked"):
        rows = read(folders[name], {"prompt": messages[:4], "completion": messages[4:]})
        assert learned(rows, folders[name]) == ["d<eos>"]


GOOD = talk([("a", "b")])


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{torn\n", "malformed"),
        ([1], "Expected `object`"),
        ({"messages": [{"role": "user", "content": 3}]}, r"\$\.messages\[0\]\.content"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "tool_calls"),
        ({"messages": []}, "no turn of the 'assistant'"),
        ({"messages": GOOD["messages"][:2]}, "no turn of the 'assistant'"),
        ({"text": "a"}, "a row holds"),
        ({"prompt": "a"}, "a row holds"),
        ({"prompt": "a", "completion": GOOD["messages"]}, "a row holds"),
        ({"prompt": "", "completion": ""}, "nothing for the model to say"),
        ({"prompt": "É", "completion": "a"}, "cannot write"),
        (talk([("a", "b" * 99)]), "chat.max_tokens = 60"),
    ],
)
def test_a_row_that_cannot_be_learned_from_is_named_by_its_line(
    folders: dict[str, Path], row: object, told: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)rows\.jsonl, line 3: .*{told}"):
        read(folders["plain"], GOOD, "\n", row, max_tokens=60, too_long="refuse")


def test_a_template_that_rewrites_what_came_before_is_refused_where_earlier_turns_are_learned(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(ConfigError, match=r"line 1: message 5: the template writes .* otherwise"):
        read(folders["forgetful"], talk([("a", "b"), ("c", "d")]))


def test_long_rows_are_dropped_or_cut_and_counted(folders: dict[str, Path]) -> None:
    long, hopeless = talk([("a", "b" * 99)]), talk([("a" * 99, "b")])
    dropped = read(folders["plain"], GOOD, long, hopeless, max_tokens=60)
    assert (len(dropped.samples), dropped.dropped, dropped.cut) == (1, 2, 0)
    assert dropped.told() == "2 too long and dropped"
    cut = read(folders["plain"], GOOD, long, hopeless, max_tokens=60, too_long="cut")
    assert ([len(sample.tokens) for sample in cut.samples], cut.dropped, cut.cut) == (
        [len(dropped.samples[0].tokens), 60],
        1,
        1,
    )
    assert len(read(folders["plain"], GOOD, GOOD, GOOD, most=2).samples) == 2


def test_a_folder_without_a_template_or_a_tokenizer_is_refused(tiny_moe: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        ChatTemplate.load(tiny_moe)
    with pytest.raises(ModelError, match="no tokenizer"):
        ChatTemplate.load(tmp_path)


def test_a_recipe_with_rows_makes_a_model_and_looks_at_those_it_does_not_learn(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(talk([(str(n), str(n + 1))])) + "\n" for n in range(20)), encoding="utf-8")
    tree = {
        "model": {"folder": str(folders["plain"])},
        "chat": {"file": str(file)},
        "sft": {"held_out": 4, "passes": 2, "examples_per_update": 8, "look_every": 2},
    }
    lines = list(make_model(config.SftRecipe.model_validate(tree), tmp_path / "made", clock=lambda: 0.0))
    assert "16 examples, 4 held out" in lines[0]
    assert lines[-2].startswith("update     4   loss ")
    assert "held-out 0.000 loss " in lines[-2]
    assert (tmp_path / "made" / "chat_template.jinja").is_file()
    gone = config.SftRecipe.model_validate({**tree, "chat": {"file": str(tmp_path / "gone")}})
    with pytest.raises(ConfigError, match="cannot be read"):
        list(make_model(gone, tmp_path / "other", clock=lambda: 0.0))
