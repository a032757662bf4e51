"""Round trips, special tokens kept apart from text, agreement with transformers, and every torn folder."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contraflow.errors import ModelError
from contraflow.model.tokenizer import ALPHABET, Tokenizer, build_char_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def test_text_goes_to_ids_and_back_one_per_character(tokenizer):
    @given(st.text(alphabet=ALPHABET, max_size=60))
    def check(text):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.pieces(ids) == list(text)
        assert all(1 < i < tokenizer.size for i in ids)

    check()


def test_it_covers_what_the_shipped_environments_say(tokenizer):
    assert tokenizer.decode(tokenizer.encode("12+34*5-6=[1] ?=")) == "12+34*5-6=[1] ?="
    assert (tokenizer.eos, tokenizer.size) == (1, 2 + len(ALPHABET))


def test_special_tokens_in_a_text_are_text_unless_asked_for(tokenizer):
    assert tokenizer.encode("1<eos>", special=True) == [tokenizer.encode("1")[0], tokenizer.eos]
    assert len(tokenizer.encode("1<eos>")) == 6
    assert tokenizer.eos not in tokenizer.encode("1<eos>")


def test_decoding_leaves_special_tokens_out_and_pieces_show_them(tokenizer):
    ids = [*tokenizer.encode("64"), tokenizer.eos, 999]
    assert tokenizer.decode(ids) == "64"
    assert tokenizer.pieces(ids) == ["6", "4", "<eos>", "<id 999>"]
    assert tokenizer.transcribe(ids) == "64<eos><id 999>"
    assert tokenizer.transcribe(ids[:3]) == "64<eos>"


@pytest.mark.parametrize("text", ["é", "1\t2", "A", "\ud800"])
def test_text_outside_the_vocabulary_is_refused_not_dropped(tokenizer, text):
    with pytest.raises(ModelError, match="cannot write"):
        tokenizer.encode(text)


def test_transformers_reads_the_same_tokenizer(folder, tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    text = "12 + 34=[5*6]\nok?"
    assert theirs(text).input_ids == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, tokenizer.size)


def test_a_byte_level_tokenizer_with_an_end_token_object_is_read(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos == 256
    assert tokenizer.decode([*tokenizer.encode("naïve <|end|>"), 256]) == "naïve <|end|>"


def test_an_alphabet_with_a_character_twice_is_refused(tmp_path):
    with pytest.raises(ModelError, match="twice"):
        build_char_tokenizer(tmp_path, "aba")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", b"{", "is not a tokenizer"),
        ("tokenizer.json", b"\xff\xfe", "is not text"),
        ("tokenizer_config.json", None, "tokenizer_config.json is missing"),
        ("tokenizer_config.json", b"[]", "is not a JSON object"),
        ("tokenizer_config.json", b"{", "is not a JSON object"),
        ("tokenizer_config.json", b"{}", "names no eos_token"),
        ("tokenizer_config.json", b'{"eos_token": "</s>"}', "'</s>' .* is not in its vocabulary"),
    ],
)
def test_a_torn_folder_is_refused_with_the_reason(tmp_path, file, content, message):
    build_char_tokenizer(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(tmp_path)
