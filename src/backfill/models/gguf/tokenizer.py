"""The tokenizer in a GGUF file's metadata, as ``tokenizer.json`` and ``tokenizer_config.json``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from backfill.core.errors import CorruptModel, ModelError, UnsupportedModel
from backfill.models.gguf.file import GgufFile

logger = logging.getLogger(__name__)

# The regular expressions of the tokenizer.json of Llama 3 and Qwen 2.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLIT_OF = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}


def build_tokenizer(file: GgufFile, config: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and the contents of ``tokenizer_config.json``.

    The embedding table of ``config``, the model's ``config.json``, must hold the vocabulary.

    Raises:
        UnsupportedModel: a tokenizer or pre-tokenizer that is not implemented.
        CorruptModel: metadata is missing or inconsistent.
    """
    tokens, kinds = _vocabulary(file, config["vocab_size"])
    model = file.need("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_level_tokenizer, "llama": _sentencepiece_tokenizer}
    if model not in builders:
        raise UnsupportedModel(
            f"{file.path}: tokenizer {model[:60]!r} is not supported; supported: {', '.join(builders)}"
        )
    try:
        tokenizer, adds_bos = builders[model](file, tokens, kinds)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for an inconsistent vocabulary
        raise CorruptModel(f"{file.path}: the tokenizer's parts do not fit together: {error}") from None
    _mark_whole_tokens(tokenizer, tokens, kinds)
    names = _special_tokens(file, tokens)
    _add_template(file, tokenizer, names, adds_bos)
    template = file.get("tokenizer.chat_template", str)
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **names,
        **({"chat_template": template} if template is not None else {}),
    }


def _vocabulary(file: GgufFile, num_embeddings: int) -> tuple[list[str], list[int]]:
    """Tokens by id, and the ``TokenType`` of each. Raises: CorruptModel if the numbers of both differ."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list, [TokenType.NORMAL] * len(tokens))
    if len(kinds) != len(tokens) or len(tokens) > num_embeddings:
        raise CorruptModel(
            f"{file.path}: {len(tokens)} tokens, {len(kinds)} token types, {num_embeddings} embeddings"
        )
    size = len(tokens)
    # Unused tokens at the end pad the embedding table and are not part of the vocabulary.
    while size and kinds[size - 1] == TokenType.UNUSED:
        size -= 1
    return tokens[:size], kinds[:size]


def _mark_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Let the tokenizer match user-defined and special tokens as a whole, before it splits the text."""
    for kind, special in (
        (TokenType.USER_DEFINED, False),
        (TokenType.CONTROL, True),
        (TokenType.UNKNOWN, True),
    ):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, k in zip(tokens, kinds, strict=True)
            if k == kind and token
        ]
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add(added)


def _special_tokens(file: GgufFile, tokens: Sequence[str]) -> dict[str, str]:
    """The special tokens' texts by transformers' names. Raises: CorruptModel for an id out of range."""
    names = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.get(f"tokenizer.ggml.{key}_token_id", int)
        if index is not None and not 0 <= index < len(tokens):
            raise CorruptModel(
                f"{file.path}: {key}_token_id {index} is outside the vocabulary of {len(tokens)}"
            )
        if index is not None:
            names[f"{name}_token"] = tokens[index]
    return names


def _add_template(file: GgufFile, tokenizer: Tokenizer, names: Mapping[str, str], adds_bos: bool) -> None:
    """Make encoding add the begin and end tokens that the file asks for."""
    bos = names.get("bos_token") if file.get("tokenizer.ggml.add_bos_token", bool, adds_bos) else None
    eos = names.get("eos_token") if file.get("tokenizer.ggml.add_eos_token", bool, False) else None

    def around(part: str, sequence: int) -> list[str]:
        return [f"{each}:{sequence}" for each in (bos, part, eos) if each]

    special = [(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token]
    # Also without BOS and EOS: without a template transformers would invent one.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around("$A", 0), pair=around("$A", 0) + around("$B", 1), special_tokens=special
    )


def _byte_level_tokenizer(
    file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """Byte-level BPE with the file's pre-tokenizer, and whether it adds BOS by default.

    Raises: UnsupportedModel for another pre-tokenizer; CorruptModel for a malformed merge.
    """
    del kinds
    merges = [tuple(merge.split(" ")) for merge in file.need("tokenizer.ggml.merges", list)]
    if any(len(merge) != 2 for merge in merges):
        raise CorruptModel(f"{file.path}: a merge is not two tokens")
    pre = file.get("tokenizer.ggml.pre", str, "default")
    vocab = _first_ids(tokens)
    is_llama3 = _SPLIT_OF.get(pre) == _LLAMA3_SPLIT
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    if _SPLIT_OF.get(pre) == _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, is_llama3


def _pre_tokenizer(file: GgufFile, pre: str) -> Any:
    """How ``tokenizer.ggml.pre`` splits text before byte-level BPE. Raises: UnsupportedModel."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLIT_OF)
    if pre in _SPLIT_OF:
        split = pre_tokenizers.Split(Regex(_SPLIT_OF[pre]), behavior="isolated", invert=False)
        return pre_tokenizers.Sequence([split, byte_level])
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if pre == "default":
        logger.warning("%s names no pre-tokenizer; GPT-2's is used, which may not be the model's", file.path)
    elif pre != "gpt-2":
        known = ", ".join([*_SPLIT_OF, "smollm", "gpt-2"])
        raise UnsupportedModel(
            f"{file.path}: pre-tokenizer {pre[:60]!r} is not supported; supported: {known}"
        )
    return byte_level


def _sentencepiece_tokenizer(
    file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE with byte fallback (Llama 1 and 2, early Mistral); it adds BOS by default.

    Source: transformers ``convert_slow_tokenizer.LlamaConverter``.
    """
    scores: list[float] = file.need("tokenizer.ggml.scores", list)
    vocab = _first_ids(tokens)
    mergeable = {
        token: scores[i]
        for token, i in vocab.items()
        if kinds[i] in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", int, 0)]
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges_by_score(mergeable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _first_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Id of each token; the first id of a token that occurs twice."""
    return {token: i for i, token in reversed(list(enumerate(tokens)))}


def _merges_by_score(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """BPE merges equal to SentencePiece's rule "join the neighbours whose union has the highest score".

    Any two pieces that form a piece can be joined, so each split of a piece into two is a merge. Merges rank
    by the score of the piece; of equal ones, the shorter left part comes first.
    """
    pairs = [
        (-score, len(piece[:cut]), piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    pairs.sort()
    return [(left, right) for _, _, left, right in pairs]
