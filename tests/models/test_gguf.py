import json
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from backfill.core.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from backfill.models.config import GenerationDefaults, ModelConfig
from backfill.models.gguf import GgufFile, convert_gguf

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CORPUS = [
    "def add(x, y):\n    return x + y\n",
    "the cat sat on the mat; the dog's 12345 cats",
    "héllo wörld 你好 🎉",
]
TEXTS = [*CORPUS, "", " ", "  two  spaces\n\n\t", "I've 3.14159 it's DON'T", "e\u0301 \u212b", "\x00\ufffd"]
SPECIALS = ["<|end|>", "<|user|>", "<|pad|>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers.": "blk.",
}


def make_model(config: Any) -> torch.nn.Module:
    """A random model whose weights bf16 holds exactly; large enough that positions and heads matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).bfloat16())
    return model


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order in which llama.cpp stores q and k of Llama models."""
    rows = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def stored_tensors(model: Any) -> dict[str, np.ndarray]:
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values, stored = tensor.float().numpy(), name
        if model.config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = interleave(values, getattr(model.config, heads))
        for long, short in NAMES.items():
            stored = stored.replace(long, short)
        tensors[stored] = np.ascontiguousarray(values)
    return tensors


def make_vocabulary(pre_tokenizer: Any = None) -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level BPE; the special tokens come last."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return [*tokens, *SPECIALS], [" ".join(merge) for merge in model["merges"]]


def write_gguf(
    path: Path,
    arch: str,
    config: Any,
    tensors: Mapping[str, np.ndarray],
    *,
    pre: str | None = "gpt-2",
    quant: Quant | None = None,
    extra: Mapping[str, Any] | None = None,
    vocabulary: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter lays it out; ``extra`` adds or replaces metadata."""
    tokens, merges = vocabulary or make_vocabulary()
    writer = gguf.GGUFWriter(path, arch)
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", 16),
    }
    fields: dict[str, Any] = {f"{arch}.{key}": value for key, value in sizes.items()}
    fields[f"{arch}.attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    fields[f"{arch}.rope.freq_base"] = float(config.rope_parameters["rope_theta"])
    fields |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": tokens.index("<|user|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|pad|>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    for key, value in (fields | dict(extra or {})).items():
        if value is not None:
            add_field(writer, key, value)
    for name, values in tensors.items():
        if quant is not None and values.ndim == 2:
            data = gguf.quants.quantize(values, quant)
            writer.add_tensor(name, data, raw_dtype=quant)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def write_tiny(path: Path, **options: Any) -> Path:
    """The smallest valid Llama file; for tests of everything but the weights."""
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1}, tie_word_embeddings=True)
    return write_gguf(path, "llama", config, stored_tensors(make_model(config)), **options)


def load_tokenizer(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (LlamaConfig(**SIZES), {}),
        (LlamaConfig(**SIZES, tie_word_embeddings=True, head_dim=32), {}),
        (LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3)), {}),
        (
            LlamaConfig(**SIZES, rope_parameters=dict(LINEAR)),
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        ),
        (
            Qwen2Config(**SIZES, rope_parameters=dict(YARN)),
            {
                "qwen2.rope.scaling.type": "yarn",
                "qwen2.rope.scaling.factor": 4.0,
                "qwen2.rope.scaling.original_context_length": 128,
            },
        ),
        (Qwen2Config(**SIZES, tie_word_embeddings=True), {}),
        (Qwen3Config(**SIZES, head_dim=32), {}),
    ],
    ids=["llama", "llama-tied", "llama3-rope", "llama-linear", "qwen2-yarn", "qwen2-tied", "qwen3"],
)
def test_logits_equal_those_of_the_source(config: Any, extra: dict[str, Any], tmp_path: Path) -> None:
    model: Any = make_model(config)
    tensors = stored_tensors(model)
    if config.rope_parameters["rope_type"] == "llama3":
        plain = 1 / 500_000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    source = write_gguf(tmp_path / "m.gguf", config.model_type, config, tensors, extra=extra)
    folder = convert_gguf(source, tmp_path / "out")
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 320, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert ModelConfig.from_folder(folder).num_parameters == model.num_parameters()


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q5_1, Quant.Q8_0])
def test_dequantises_each_row(quant: Quant, tmp_path: Path) -> None:
    config = Qwen3Config(**SIZES, head_dim=16)
    tensors = stored_tensors(make_model(config))
    source = write_gguf(tmp_path / "m.gguf", "qwen3", config, tensors, quant=quant)
    written = load_file(convert_gguf(source, tmp_path / "out") / "model.safetensors")
    for name, stored in (("q_proj", "attn_q"), ("down_proj", "ffn_down")):
        values = tensors[f"blk.1.{stored}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant))
        found = next(
            tensor
            for key, tensor in written.items()
            if f"layers.1.{name}" in key.replace("self_attn.", "").replace("mlp.", "")
        )
        assert torch.equal(found, expected.bfloat16())


def test_rows_are_converted_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "m.gguf", quant=Quant.Q8_0)
    whole = load_file(convert_gguf(source, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr("backfill.models.gguf._CHUNK_ELEMENTS", 200)
    steps: list[tuple[int, int]] = []
    folder = convert_gguf(
        source, tmp_path / "out", progress=lambda step, done, all_: steps.append((done, all_))
    )
    chunked = load_file(folder / "model.safetensors")
    assert all(torch.equal(chunked[name], tensor) for name, tensor in whole.items())
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]


def test_tokenizer_folder(tmp_path: Path) -> None:
    folder = convert_gguf(write_tiny(tmp_path / "m.gguf"), tmp_path / "out")
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
    folder = convert_gguf(write_tiny(tmp_path / "m.gguf"), tmp_path / "out")
    code = (
        "import sys, backfill.models.gguf; from transformers import PreTrainedTokenizerFast as T; "
        f"T.from_pretrained({str(folder)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", None])
def test_every_text_survives_the_tokenizer(pre: str | None, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert_gguf(write_tiny(tmp_path / "m.gguf", pre=pre), tmp_path / "out"))
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
    folder = convert_gguf(write_tiny(tmp_path / "m.gguf", pre=pre), tmp_path / "out")
    splitter = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str("a 12345 DON'T")] == pieces


@pytest.mark.parametrize(
    ("pre", "asked", "adds"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_begin_token(pre: str, asked: bool | None, adds: bool, tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_bos_token": asked}
    folder = convert_gguf(write_tiny(tmp_path / "m.gguf", pre=pre, extra=extra), tmp_path / "out")
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
    folder = convert_gguf(source, tmp_path / "out")
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
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    source = write_tiny(
        tmp_path / "m.gguf",
        pre="default",
        vocabulary=([*tokens, *SPECIALS], []),
        extra=extra
        | {"tokenizer.ggml.token_type": [*kinds, 3, 3, 3], "tokenizer.ggml.scores": [*scores, 0.0, 0.0, 0.0]},
    )
    tokenizer = load_tokenizer(convert_gguf(source, tmp_path / "out"))
    ids = tokenizer.encode("the cat é")
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁the", "▁cat", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat é"
    assert tokenizer.decode(tokenizer.encode(" the  cat", add_special_tokens=False)) == " the  cat"
    # "th" has a higher score than "at", which comes first.
    ids = tokenizer.encode("</s>ath", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["</s>", "▁", "a", "th"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5'"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"split.count": 2}, "split"),
        ({"llama.attention.head_count": [4, 2]}, "differs between layers"),
    ],
)
def test_refuses_what_it_cannot_convert(extra: dict[str, Any], named: str, tmp_path: Path) -> None:
    architecture = extra.pop("general.architecture", None)
    source = write_tiny(tmp_path / "m.gguf", extra=extra)
    if architecture is not None:
        source.write_bytes(
            source.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0gemma", 1)
        )
    with pytest.raises(UnsupportedModel, match=named):
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.block_count": 2}, "blk.1.attn_norm.weight is missing"),
        ({"llama.feed_forward_length": 97}, r"ffn_gate.weight has shape \[96, 64\], expected \[97, 64\]"),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"llama.context_length": "long"}, "llama.context_length must be int"),
        ({"llama.attention.head_count_kv": 0}, "num_key_value_heads"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id 9999 is outside"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "tokenizer's parts do not fit"),
        ({"tokenizer.ggml.merges": ["zz"]}, "a merge is not two tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
    ],
)
def test_contradictions_are_named(extra: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match=named):
        convert_gguf(write_tiny(tmp_path / "m.gguf", extra=extra), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_tensors_and_rope_factors(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    tensors = stored_tensors(make_model(config))
    bias = write_gguf(
        tmp_path / "a.gguf", "llama", config, tensors | {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    )
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.bias"):
        convert_gguf(bias, tmp_path / "out")
    odd = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        convert_gguf(write_gguf(tmp_path / "b.gguf", "llama", config, tensors | odd), tmp_path / "out")
    tensors["output_norm.weight"][0] = np.nan
    with pytest.raises(CorruptModel, match="output_norm"):
        convert_gguf(write_gguf(tmp_path / "c.gguf", "llama", config, tensors), tmp_path / "out")


def test_every_truncation_is_found(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    end = len(whole) - 64  # the last tensor is 64 float32 and fills its alignment
    for size in [*range(1, 200), *range(200, end, 997), end - 1, end]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptModel):
            GgufFile(path)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "m.gguf").read_bytes()
    header = whole.index(b"output_norm.weight") + 64
    random = np.random.default_rng(3)
    path = tmp_path / "damaged.gguf"
    outcomes = set()
    for i in range(150):
        data = bytearray(whole)
        for position in random.integers(0, 1200 if i % 2 else header, size=3):
            data[position] = random.integers(0, 256)
        path.write_bytes(data)
        outcomes.add(outcome_of_converting(path, tmp_path / f"out{i}"))
        assert not list(tmp_path.glob(".*"))
    assert (
        {"CorruptModel", "UnsupportedModel"} <= outcomes <= {"CorruptModel", "UnsupportedModel", "converted"}
    )


def outcome_of_converting(path: Path, folder: Path) -> str:
    try:
        convert_gguf(path, folder)
    except ModelError as error:
        return "more than one line" if "\n" in str(error) else type(error).__name__
    return "converted"


def test_lengths_beyond_the_file_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    preamble = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1s", 1, b"k")
    for value in (
        struct.pack("<IIQ", 9, 0, 1 << 60),
        struct.pack("<IIQ", 9, 8, 1 << 60),
        struct.pack("<IQ", 8, 1 << 63),
        struct.pack("<IIQ", 9, 9, 1 << 60),
        struct.pack("<I", 77),
    ):
        path.write_bytes(preamble + value + bytes(1000))
        with pytest.raises(CorruptModel):
            GgufFile(path)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelNotFound):
        GgufFile(path)
    path.touch()
    with pytest.raises(CorruptModel):
        GgufFile(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModel, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(UnsupportedModel, match="version 1"):
        GgufFile(path)


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")

    def fail(step: str, done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="No space left on device"):
        convert_gguf(source, tmp_path / "out", progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ModelError, match="cannot write"):
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
