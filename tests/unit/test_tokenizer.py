"""The text tokenizer: never an id that steers, and otherwise what the whole tokenizer file says."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from python_backend_models.contract import SPECIAL_TOKEN_IDS, TEXT_TOKENS
from python_backend_models.tiny_checkpoint import tokenizer_description
from python_backend_models.tokenizer import TextTokenizer, TokenizerMismatchError


def write(path: Path, description: Any) -> Path:
    path.write_text(json.dumps(description), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", tokenizer_description())


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> TextTokenizer:
    return TextTokenizer(file)


@pytest.fixture(scope="module")
def whole(file: Path) -> Tokenizer:
    return Tokenizer.from_file(str(file))


@given(st.text(max_size=60))
def test_equals_the_whole_tokenizer_on_plain_text(
    tokenizer: TextTokenizer, whole: Tokenizer, text: str
) -> None:
    assert tokenizer.ids(text) == whole.encode(text, add_special_tokens=False).ids


@given(
    st.lists(st.sampled_from([*SPECIAL_TOKEN_IDS, "<|", "|>", "a", " ", "<|endoftext|>"]), max_size=8).map(
        "".join
    )
)
def test_special_tokens_are_plain_characters(tokenizer: TextTokenizer, file: Path, text: str) -> None:
    ids = tokenizer.ids(text)
    assert all(token_id < TEXT_TOKENS for token_id in ids)
    names = {token_id: token for token, token_id in json.loads(file.read_text())["model"]["vocab"].items()}
    assert decoders.ByteLevel().decode([names[token_id] for token_id in ids]) == text


def test_the_whole_tokenizer_would_have_matched_them(whole: Tokenizer) -> None:
    for token, token_id in SPECIAL_TOKEN_IDS.items():
        assert whole.encode(f"a{token}b", add_special_tokens=False).ids[1] == token_id


def test_text_is_composed_first(tokenizer: TextTokenizer) -> None:
    decomposed = "e\u0301"
    assert tokenizer.ids(decomposed) == tokenizer.ids(unicodedata.normalize("NFC", decomposed))
    assert tokenizer.ids(decomposed) != [*tokenizer.ids("e"), *tokenizer.ids("\u0301")]


def test_special_tokens_inside_the_vocabulary_are_not_reachable(tmp_path: Path) -> None:
    description = tokenizer_description()
    # One token that BPE itself would build: a merge whose result is a control token's id.
    description["model"]["vocab"]["qj"] = 151_700
    description["model"]["merges"].append(["q", "j"])
    with pytest.raises(TokenizerMismatchError, match="qj"):
        TextTokenizer(write(tmp_path / "tokenizer.json", description))


@pytest.mark.parametrize("token", SPECIAL_TOKEN_IDS)
def test_each_special_id_is_verified(tmp_path: Path, token: str) -> None:
    for replacement, said in ((151_660, "is 151660"), (None, "is missing")):
        description = tokenizer_description()
        description["added_tokens"] = [t for t in description["added_tokens"] if t["content"] != token]
        del description["model"]["vocab"][token]
        if replacement:
            description["added_tokens"].append({"content": token, "id": replacement})
        with pytest.raises(TokenizerMismatchError) as caught:
            TextTokenizer(write(tmp_path / "tokenizer.json", description))
        assert f"{token} {said}, must be {SPECIAL_TOKEN_IDS[token]}" in str(caught.value)


def test_every_wrong_id_is_named_at_once(tmp_path: Path) -> None:
    description = tokenizer_description()
    description["added_tokens"] = []
    for token in SPECIAL_TOKEN_IDS:
        description["model"]["vocab"][token] += 1
    with pytest.raises(TokenizerMismatchError) as caught:
        TextTokenizer(write(tmp_path / "tokenizer.json", description))
    assert all(token in str(caught.value) for token in SPECIAL_TOKEN_IDS)


def test_a_byte_without_a_token_is_fatal(tmp_path: Path) -> None:
    description = tokenizer_description()
    del description["model"]["vocab"]["Ġ"]
    description["model"]["merges"] = []
    with pytest.raises(TokenizerMismatchError, match="1 of the 256 bytes"):
        TextTokenizer(write(tmp_path / "tokenizer.json", description))


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", '{"model": {"vocab": []}}', '{"model": 1}'])
def test_not_a_tokenizer(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(TokenizerMismatchError, match=r"tokenizer\.json"):
        TextTokenizer(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TextTokenizer(tmp_path / "tokenizer.json")
