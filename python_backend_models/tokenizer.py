"""The checkpoint's tokenizer, for text alone: whatever is written, no id that steers the model comes out.

A `tokenizer.json` matches its special tokens anywhere in a text. Here they are taken out of it before it is
loaded, so `<|im_end|>` in a lyric is ten ordinary characters. The special ids are read from the same file and
verified; the prompt places them itself.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from python_backend_models.contract import SPECIAL_TOKEN_IDS, TEXT_TOKENS


class TokenizerMismatchError(ValueError):
    """The file is not the tokenizer of this model; its text names each thing that is wrong."""


class TextTokenizer:
    """Text to ids below `TEXT_TOKENS`: NFC, the Qwen2 split, byte-level BPE. Threads may share it."""

    def __init__(self, tokenizer_json: Path) -> None:
        """Load and verify.

        Raises:
            OSError: the file can't be read.
            TokenizerMismatchError: it isn't a tokenizer, a special id is wrong, or a byte has no
                token (so some text could not be written).
        """
        try:
            description = json.loads(tokenizer_json.read_text(encoding="utf-8"))
            vocabulary: dict[str, int] = description["model"]["vocab"]
            added = {token["content"]: token["id"] for token in description.get("added_tokens") or ()}
            _verify(vocabulary, added)
            description["added_tokens"] = []
            description["model"]["vocab"] = {t: i for t, i in vocabulary.items() if i < TEXT_TOKENS}
            # Would add ids of their own, or drop some.
            description["post_processor"] = description["truncation"] = description["padding"] = None
            self._tokenizer: Any = Tokenizer.from_str(json.dumps(description))
        except TokenizerMismatchError as error:
            raise TokenizerMismatchError(f"{tokenizer_json.name}: {error}") from None
        except OSError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerMismatchError(f"{tokenizer_json.name}: not a tokenizer file: {error}") from error

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without any framing."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _verify(vocabulary: dict[str, int], added: dict[str, int]) -> None:
    wrong: list[str] = []
    for token, expected in SPECIAL_TOKEN_IDS.items():
        found = added.get(token, vocabulary.get(token))
        if found != expected:
            wrong.append(f"{token} is {'missing' if found is None else found}, must be {expected}")
    silent = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if silent:
        wrong.append(f"{len(silent)} of the 256 bytes have no token")
    if wrong:
        raise TokenizerMismatchError("; ".join(wrong))
