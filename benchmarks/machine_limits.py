"""What a machine can do: its name, its measured rates, and the time that FLOPs and bytes alone take."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from backfill.models.config import OPT_POSITION_OFFSET, ModelConfig
from backfill.models.tensor_shapes import num_parameters

if TYPE_CHECKING:
    import torch


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure_limits() -> dict[str, float]:
    """GFLOP/s of torch's large products, in the faster of its types; GB/s of reading and copying memory.

    Memory is read by a matrix-vector product.
    """
    import torch

    dtype = fastest_dtype()
    a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    matrix_s = best_time(lambda: torch.mm(a, b), 15)
    source = torch.zeros(256 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy_s = best_time(lambda: target.copy_(source), 7)
    rows, x = source.view(torch.float32).view(-1, 4096), torch.ones(4096)
    read_s = best_time(lambda: torch.mv(rows, x), 7)
    return {
        "matrix_gflop_s": 2 * 2048**3 / matrix_s / 1e9,
        "read_gb_s": source.numel() / read_s / 1e9,
        "copy_gb_s": source.numel() / copy_s / 1e9,
    }


def fastest_dtype() -> torch.dtype:
    """float32, or bfloat16 where torch multiplies it faster; without instructions, that takes minutes."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.randn(512, 512).to(dtype), torch.randn(512, 512).to(dtype)
        return best_time(lambda: torch.mm(a, b), 3)

    return min((torch.float32, torch.bfloat16), key=seconds)


def best_time(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        started_at_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at_s)
    return min(times)


def floor_of(
    config: ModelConfig,
    machine: Mapping[str, float],
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    stream_len: int,
    bytes_per_weight: float = 2,
) -> dict[str, float]:
    """What the machine's limits allow: products at the matrix rate, weights and KV read once a step.

    The prefill gives an output's first token, so n tokens take n - 1 decode steps. The FLOPs of attention
    (under 3 % here) and all other operators are left out, so no engine reaches this.
    """
    rate, read = machine["matrix_gflop_s"] * 1e9, machine["read_gb_s"] * 1e9
    embedding = config.vocab_size * (config.word_embed_proj_dim or config.hidden_size)
    weights = read_parameters(config)
    layers = weights - embedding

    def step_s(num_tokens: int, num_sampled: int) -> float:
        flops = 2 * (num_tokens * layers + num_sampled * embedding)
        return max(flops / rate, bytes_per_weight * weights / read)

    def decode_s(num_seqs: int, num_tokens: int) -> float:
        """Seconds of each sequence's ``num_tokens`` but the first; step k has a context of input_len + k."""
        kv_bytes = config.kv_bytes_per_token(2) * (input_len + num_tokens / 2)
        return (num_tokens - 1) * (step_s(num_seqs, num_seqs) + num_seqs * kv_bytes / read)

    first_s = step_s(input_len, 1)
    batch_s = step_s(num_prompts * input_len, num_prompts) + decode_s(num_prompts, output_len)
    return {
        "batch_tok_s": num_prompts * (input_len + output_len) / batch_s,
        "stream_tok_s": stream_len / (first_s + decode_s(1, stream_len)),
        "first_token_s": first_s,
    }


def kept_bytes_per_weight(folder: Path, config: ModelConfig) -> float:
    """Of the weights that a step reads, as the default options keep them."""
    import torch

    from backfill.models.checkpoint import open_checkpoint

    kept = open_checkpoint(folder, dtype=torch.bfloat16, quantization="auto")
    table = config.vocab_size * (config.word_embed_proj_dim or config.hidden_size)
    weights = read_parameters(config)
    return ((weights - table) * kept.layer_width + table * kept.table_width) / weights


def read_parameters(config: ModelConfig) -> int:
    """Weights that a step reads whole: all but the tables in which it looks up rows."""
    looked_up = 0
    if not config.tie_word_embeddings:
        looked_up += config.vocab_size * (config.word_embed_proj_dim or config.hidden_size)
    if config.rope is None:
        looked_up += (config.max_position_embeddings + OPT_POSITION_OFFSET) * config.hidden_size
    return num_parameters(config) - looked_up
