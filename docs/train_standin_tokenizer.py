"""Makes the stand-in tokenizer anew: ``python docs/train_standin_tokenizer.py``.

The text it learns from is on any machine: the docstrings of Python's standard library and the language
reference behind ``help()``. Another Python version gives slightly other merges, so the files are checked in.
"""

import ast
import collections
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent.parent / "shared" / "standin"
VOCAB = 4096
COMMON_WORDS = 500
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Frequent here only because the text is about programs.
JARGON = """
arg args async bool bytes callable callback codec config coroutine debugger def descriptor dict encoded
encodings filename fileno func gencodec int iterable iterator json len mailbox metaclass metadata multi
namespace newline param params parser pathname prefix str subclass subclasses subprocess superclass sys
timeout traceback tuple tuples turtle unicode whitespace widget widgets
"""
SHORT_WORDS = "a an as at be by do if in is it no of on or so to up we"


def texts() -> Iterator[str]:
    """Yield every docstring of the standard library and every topic of the language reference."""
    from pydoc_data.topics import topics

    yield from topics.values()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def train(corpus: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `VOCAB` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def common_words(tokenizer: Tokenizer, corpus: list[str]) -> list[str]:
    """Return the most frequent lower-case words that are one token each, most frequent first."""
    counts = collections.Counter(
        word for text in corpus for word in re.findall(r"(?<= )[a-z]+(?=[ ,.;:?!])", text)
    )
    jargon, short = set(JARGON.split()), set(SHORT_WORDS.split())
    words = (word for word, _ in counts.most_common() if len(word) > 2 or word in short)
    whole = (word for word in words if tokenizer.token_to_id(f"\u0120{word}") is not None)
    return [word for word in whole if word not in jargon][:COMMON_WORDS]


def main() -> None:
    """Write both files."""
    corpus = list(texts())
    tokenizer = train(corpus)
    tokenizer.save(str(FOLDER / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "common_words": common_words(tokenizer, corpus),
    }
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    print(f"{tokenizer.get_vocab_size()} entries from {sum(map(len, corpus)):,} characters")


if __name__ == "__main__":
    main()
