"""The stand-in tokenizer, which every emulated model shares (docs/standin-tokenizer.md). Reads its files."""

import functools
import json
from pathlib import Path

FOLDER = Path(__file__).parent
"""Folder with ``tokenizer.json`` and ``tokenizer_config.json``."""


@functools.cache
def vocab_slice() -> tuple[tuple[int, ...], int]:
    """Return (ids of common English words, id of the end of a turn), for engines that make text up.

    Each id decodes to one word with a space before it, so that what an emulated engine says reads like words.
    """
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text("utf-8"))
    ids = tokenizer["model"]["vocab"]
    config = json.loads((FOLDER / "tokenizer_config.json").read_text("utf-8"))
    # Byte-level BPE writes a space as U+0120.
    return tuple(ids[f"\u0120{word}"] for word in config["common_words"]), ids[config["eos_token"]]
