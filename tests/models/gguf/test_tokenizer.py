import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from backfill.models.generation_config import GenerationDefaults
from tests.models.gguf.builders import CORPUS, SPECIALS, folder_of_gguf, make_vocabulary, write_tiny

TEXTS = [*CORPUS, "", " ", "  two  spaces\n\n\t", "I've 3.14159 it's DON'T", "e\u0301 \u212b", "\x00\ufffd"]


def load_tokenizer(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_tokenizer_folder(tmp_path: Path) -> None:
    folder = folder_of_gguf(write_tiny(tmp_path / "m.gguf"), tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    tokens, _ = make_vocabulary()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|user|>",
        "<|end|>",
        "<|pad|>",
    )
    assert tokenizer.eos_token_id == tokens.index("<|end|>")
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(len(tokens)))
    text = tokenizer.apply_chat_template([{"content": "cat"}], tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert text == "<|user|>cat<|end|>"
    assert (ids[0], ids[-1]) == (tokens.index("<|user|>"), tokens.index("<|end|>"))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "cat"
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (tokens.index("<|end|>"),)


def test_tokenizer_loads_without_torch(tmp_path: Path) -> None:
    folder = folder_of_gguf(write_tiny(tmp_path / "m.gguf"), tmp_path / "out")
    code = (
        "import sys, backfill.models.gguf; from transformers import PreTrainedTokenizerFast as T; "
        f"T.from_pretrained({str(folder)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", None])
def test_every_text_survives_the_tokenizer(pre: str | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder_of_gguf(write_tiny(tmp_path / "m.gguf", pre=pre), tmp_path / "out"))
    for text in TEXTS:
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        assert decoded == (text if pre != "qwen2" else text.replace("e\u0301", "é").replace("\u212b", "Å"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ12345", "ĠDON", "'", "T"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4", "5", "ĠDON", "'", "T"]),
        ("llama-bpe", ["a", "Ġ", "123", "45", "ĠDON", "'T"]),
        ("qwen2", ["a", "Ġ", "1", "2", "3", "4", "5", "ĠDON", "'T"]),
    ],
)
def test_pre_tokenizer_splits(pre: str, pieces: list[str], tmp_path: Path) -> None:
    folder = folder_of_gguf(write_tiny(tmp_path / "m.gguf", pre=pre), tmp_path / "out")
    splitter = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("a 12345 DON'T")] == pieces


@pytest.mark.parametrize(
    ("pre", "asked", "adds"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_begin_token(pre: str, asked: bool | None, adds: bool, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_bos_token": asked}
    folder = folder_of_gguf(write_tiny(tmp_path / "m.gguf", pre=pre, extra=extra), tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("cat")
    assert (ids[0] == tokenizer.bos_token_id) == adds
    assert ids[adds:] == tokenizer.encode("cat", add_special_tokens=False)


def test_user_defined_tokens_are_found_but_kept_in_text(tmp_path: Path) -> None:
    tokens, merges = make_vocabulary()
    tokens += ["<tool>", "[UNUSED]"]
    kinds = [3 if token in SPECIALS else 1 for token in tokens[:-2]] + [4, 5]
    extra = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": 7}
    source = write_tiny(tmp_path / "m.gguf", vocabulary=(tokens, merges), extra=extra)
    folder = folder_of_gguf(source, tmp_path / "out")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("cat<tool><|end|>")
    assert ids[-2:] == [tokens.index("<tool>"), tokens.index("<|end|>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "cat<tool>"
    assert "[UNUSED]" not in tokenizer.get_vocab()
    assert GenerationDefaults.from_folder(folder).eos_token_ids == (7, tokens.index("<|end|>"))


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    words = ["▁", "t", "h", "e", "c", "a", "th", "the", "▁the", "▁c", "at", "▁ca", "▁cat", "he"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-100.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]
    extra = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.token_type": [*kinds, 3, 3, 3],
        "tokenizer.ggml.scores": [*scores, 0.0, 0.0, 0.0],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    source = write_tiny(
        tmp_path / "m.gguf",
        pre="default",
        vocabulary=([*tokens, *SPECIALS], []),
        extra=extra,
    )
    tokenizer = load_tokenizer(folder_of_gguf(source, tmp_path / "out"))
    ids = tokenizer.encode("the cat é")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁the", "▁cat", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat é"
    assert tokenizer.decode(tokenizer.encode(" the  cat", add_special_tokens=False)) == " the  cat"
    # "th" has a higher score than "at", which comes first.
    ids = tokenizer.encode("</s>ath", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["</s>", "▁", "a", "th"]
