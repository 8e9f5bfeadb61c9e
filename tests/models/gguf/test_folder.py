from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from backfill.core.config import Quantization
from backfill.core.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from backfill.kernels.quantized import QuantizedWeight
from backfill.models.checkpoint import open_checkpoint
from backfill.models.config import ModelConfig
from backfill.models.tensor_shapes import num_parameters
from backfill.models.weights import Part, SafetensorsCheckpoint
from tests.models.gguf.builders import (
    SIZES,
    folder_of_gguf,
    make_model,
    stored_tensors,
    transformers_model,
    write_gguf,
    write_tiny,
)

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
    folder = folder_of_gguf(source, tmp_path / "out")
    converted = transformers_model(folder)
    ids = torch.randint(0, 320, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert num_parameters(ModelConfig.from_folder(folder)) == model.num_parameters()


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q5_1, Quant.Q8_0])
@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_gives_what_the_file_holds(quant: Quant, quantization: Quantization, tmp_path: Path) -> None:
    config = Qwen3Config(**SIZES, head_dim=16)
    tensors = stored_tensors(make_model(config))
    source = write_gguf(tmp_path / "m.gguf", "qwen3", config, tensors, quant=quant)
    folder = folder_of_gguf(source, tmp_path / "out")
    checkpoint = open_checkpoint(folder, dtype=torch.bfloat16, quantization=quantization)
    for name, stored in (("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down")):
        values = tensors[f"blk.1.{stored}.weight"]
        expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant))
        expected = expected.view(values.shape).bfloat16()
        arguments = f"model.layers.1.{name}.weight", values.shape
        assert torch.equal(checkpoint.get(*arguments), expected)
        columns = Part(1, 32, 64)
        assert torch.equal(checkpoint.get(*arguments, columns), expected[:, 32:64])
        for part, wanted in ((None, expected), (columns, expected[:, 32:64]), (Part(0, 3, 9), expected[3:9])):
            weight = checkpoint.weight(*arguments, part)
            keeps_codes = quantization == "auto" and quant not in (Quant.F16, Quant.BF16)
            assert isinstance(weight, QuantizedWeight) == keeps_codes
            values_of = weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
            assert torch.equal(values_of, wanted)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"general.architecture": "gemma"}, "gemma"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.attention.sliding_window": 64}, "sliding_window"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"split.count": 2}, "split"),
        ({"llama.attention.head_count": [4, 2]}, "differs between layers"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5'"),
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
        folder_of_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.block_count": 2}, "blk.1.attn_norm.weight is missing"),
        ({"llama.feed_forward_length": 97}, r"ffn_gate.weight has shape \[96, 64\], expected \[97, 64\]"),
        (
            {"llama.embedding_length": 62, "llama.attention.key_length": None},
            r"llama.embedding_length \(62\) must be a multiple of llama.attention.head_count \(4\)",
        ),
        ({"llama.context_length": None}, "llama.context_length is missing"),
        ({"llama.context_length": "long"}, "llama.context_length must be int"),
        ({"llama.attention.head_count_kv": 0}, r"m\.gguf: num_key_value_heads"),
        ({"llama.block_count": 4_000_000_000}, "block_count is 4000000000, but there are 11 tensors"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id 9999 is outside"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "tokenizer's parts do not fit"),
        ({"tokenizer.ggml.merges": ["zz"]}, "a merge is not two tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
    ],
)
def test_contradictions_are_named(extra: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptModel, match=named):
        folder_of_gguf(write_tiny(tmp_path / "m.gguf", extra=extra), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_tensors_and_rope_factors(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    tensors = stored_tensors(make_model(config))
    bias = write_gguf(
        tmp_path / "a.gguf", "llama", config, tensors | {"blk.0.attn_q.bias": np.ones(64, np.float32)}
    )
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.bias"):
        folder_of_gguf(bias, tmp_path / "out")
    odd = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        folder_of_gguf(write_gguf(tmp_path / "b.gguf", "llama", config, tensors | odd), tmp_path / "out")
    tensors["output_norm.weight"][0] = np.nan
    folder = folder_of_gguf(write_gguf(tmp_path / "c.gguf", "llama", config, tensors), tmp_path / "out")
    with pytest.raises(CorruptModel, match="output_norm"):
        open_checkpoint(folder, dtype=torch.bfloat16).get("model.norm.weight", (64,))


@pytest.mark.parametrize("name", ["rope_freqs.weight", "output_norm.weight"])
def test_a_type_without_a_dequantiser_is_named(name: str, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    tensors = stored_tensors(make_model(config))
    tensors[name] = np.ones(8 if name not in tensors else len(tensors[name]), np.int32)
    source = write_gguf(tmp_path / "m.gguf", "llama", config, tensors)
    with pytest.raises(UnsupportedModel) as error:
        folder_of_gguf(source, tmp_path / "out")
    refused, _, supported = str(error.value).partition("; supported: ")
    assert refused == f"{source}: tensor {name} is of type I32, not supported"
    assert {"F32", "BF16", "Q4_1", "Q8_0", "Q4_K", "MXFP4"} <= set(supported.split(", "))
    assert not {"I32", "Q8_1"} & set(supported.split(", "))


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
        outcomes.add(outcome_of_making(path, tmp_path / f"out{i}"))
        assert not list(tmp_path.glob(".*"))
    assert {"CorruptModel", "UnsupportedModel"} <= outcomes <= {"CorruptModel", "UnsupportedModel", "made"}


def outcome_of_making(path: Path, folder: Path) -> str:
    try:
        folder_of_gguf(path, folder)
    except ModelError as error:
        return "more than one line" if "\n" in str(error) else type(error).__name__
    return "made"


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "m.gguf")

    def fail(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", fail)
    with pytest.raises(ModelError, match="No space left on device"):
        folder_of_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_existing_folder_is_left_alone(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ModelError, match="cannot write"):
        folder_of_gguf(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_file_without_codes_names_no_format(tmp_path: Path) -> None:
    folder = folder_of_gguf(write_tiny(tmp_path / "m.gguf"), tmp_path / "out")
    checkpoint = open_checkpoint(folder, dtype=torch.bfloat16, quantization="auto")
    assert (checkpoint.stored_in, checkpoint.layer_width, checkpoint.table_width) == ("", 2, 2)
    assert checkpoint.file_types == "float32"
    packed = folder_of_gguf(write_tiny(tmp_path / "p.gguf", quant=Quant.Q8_0), tmp_path / "packed")
    checkpoint = open_checkpoint(packed, dtype=torch.bfloat16, quantization="auto")
    assert (checkpoint.stored_in, checkpoint.layer_width) == ("Q8_0", 8.5 / 8)
    assert open_checkpoint(packed, dtype=torch.bfloat16, quantization="none").file_types == "Q8_0"


def test_the_file_may_be_gone(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m.gguf")
    folder = folder_of_gguf(source, tmp_path / "out")
    source.unlink()
    with pytest.raises(ModelNotFound, match=r"is a link to .*m\.gguf, which is not there any more"):
        open_checkpoint(folder, dtype=torch.bfloat16)


def test_safetensors_come_before_a_gguf_file_beside_them(tmp_path: Path) -> None:
    folder = folder_of_gguf(write_tiny(tmp_path / "m.gguf"), tmp_path / "out")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    assert isinstance(open_checkpoint(folder, dtype=torch.bfloat16), SafetensorsCheckpoint)
