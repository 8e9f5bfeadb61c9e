"""Fits the hardware profiles that simulations use to measured operator times.

    python benchmarks/fit_hardware_profiles.py --profiles FOLDER

FOLDER holds microsoft/vidur's profiling data (MIT): the times of every operator but attention of one decoder
layer on an A100, over 1 to 4,096 tokens and more, and of all-reduces. Attention, the output projection and
what a step costs beside operators are modelled here; docs/simulation.md says how and what rests on it.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from backfill.costs.fit import TimedStep, fit_cost_model, fit_error
from backfill.costs.load import StepLoad
from backfill.costs.profile import FORMAT_VERSION, CostProfile, ProfileKey

_OUT = Path(__file__).parents[1] / "src/backfill/costs/hardware_profiles"
_LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
    "add",
)
_FLOPS = 312e12  # A100, dense bf16 or fp16
_PREFILL_EFFICIENCY = 0.55  # of the peak, for attention's products and the output projection
_READ_EFFICIENCY = 0.8  # of the memory's bandwidth, for reading KV and the output projection
_MEMORY_SHARE = 0.9  # of the device that the server takes
_ACTIVATION_BYTES = 1.5 * 2**30
_COPY_BYTES_PER_S = 25e9  # PCIe 4.0 x16 carries 32 GB/s by its name, about 25 in practice
_FP16 = 2
_FEWEST_TOKENS_A_KNOT = 16


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    num_layers: int
    hidden: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_parameters: float
    max_len: int

    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _FP16


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    memory_bytes: float
    read_bytes_per_s: float


_LLAMA_2_7B = Model("llama-2-7b", 32, 4096, 32, 128, 32_000, 6.74e9, 4096)
_LLAMA_3_8B = Model("llama-3-8b", 32, 4096, 8, 128, 128_256, 8.03e9, 8192)
_LLAMA_3_70B = Model("llama-3-70b", 80, 8192, 8, 128, 128_256, 70.6e9, 8192)
_A100_40G = Device("a100-40g", 40 * 2**30, 1.555e12)
_A100_80G = Device("a100-80g", 80 * 2**30, 2.039e12)
_TARGETS = (
    (_A100_40G, _LLAMA_2_7B, 1),
    (_A100_40G, _LLAMA_3_8B, 1),
    (_A100_80G, _LLAMA_2_7B, 1),
    (_A100_80G, _LLAMA_3_8B, 1),
    (_A100_80G, _LLAMA_3_70B, 8),
)


class StepTimes:
    """Seconds of a step: the measured operators, summed, and the modelled rest."""

    def __init__(self, device: Device, model: Model, num_workers: int, folder: Path) -> None:
        self._device, self._model, self._num_workers = device, model, num_workers
        self.rows = _layer_times(folder / f"a100_{model.name}_mlp.csv", num_workers)
        self.tokens = sorted(self.rows)
        self._all_reduces = _all_reduce_times(folder / "a100_dgx_all_reduce.csv", num_workers)

    def seconds(self, load: StepLoad) -> float:
        model = self._model
        reduced = 0.0
        if self._num_workers > 1:
            sizes, times = self._all_reduces
            reduced = 2 * float(np.interp(load.num_tokens * model.hidden * _FP16, sizes, times))
        return model.num_layers * (self.rows[load.num_tokens] + reduced) + self._rest(load)

    def _rest(self, load: StepLoad) -> float:
        model, workers = self._model, self._num_workers
        flops = _FLOPS * _PREFILL_EFFICIENCY * workers
        bandwidth = self._device.read_bytes_per_s * _READ_EFFICIENCY * workers
        read_kv = load.decode_context_tokens + load.prefill_context_tokens
        pairs = load.prefill_pairs * 4 * model.hidden * model.num_layers
        output = model.vocab * model.hidden
        projection = max(output * _FP16 / bandwidth, 2 * load.num_sampled * output / flops)
        return (
            read_kv * model.kv_bytes_per_token() / bandwidth
            + pairs / flops
            + (projection if load.num_sampled else 0.0)
        )


def fit(device: Device, model: Model, num_workers: int, folder: Path) -> dict[str, object]:
    """A HardwareProfile as JSON."""
    times = StepTimes(device, model, num_workers, folder)
    fitted_on, held_out = _split(times.tokens)
    knots = _knots(fitted_on)
    costs = fit_cost_model(_steps(times, fitted_on, seed=0), knots, sampled_knots=(1, 64, 256, 1024))
    parallel = "" if num_workers == 1 else f"-tp{num_workers}"
    weights = model.num_parameters * _FP16
    kv_bytes = device.memory_bytes * _MEMORY_SHARE * num_workers - weights - _ACTIVATION_BYTES * num_workers
    profile = CostProfile(
        key=ProfileKey(model.name, f"{device.name}{parallel}", "float16"),
        num_layers=model.num_layers,
        cost=costs,
        error=fit_error(costs, _steps(times, held_out, seed=1)),
        provenance=(
            "Operators of a layer: medians of microsoft/vidur's profiling data for the A100 (MIT)"
            + (" and its all-reduce times for 8 workers." if num_workers > 1 else ".")
            + " Modelled: KV read at 80 % of the memory's bandwidth, attention products and the output"
            " projection at 55 % of 312 TFLOP/s. Made by benchmarks/fit_hardware_profiles.py."
        ),
    )
    return {
        "name": f"{device.name}-{model.name}{parallel}",
        "costs": {"format": FORMAT_VERSION, **asdict(profile)},
        "kv_tokens": int(kv_bytes // model.kv_bytes_per_token()),
        "kv_bytes_per_token": model.kv_bytes_per_token(),
        "copy_bytes_per_s": _COPY_BYTES_PER_S * num_workers,
        "max_model_len": model.max_len,
    }


def _steps(times: StepTimes, tokens: Sequence[int], seed: int) -> list[TimedStep]:
    """For each token count: one prefill, one behind a context, decodes, and decodes beside a prefill."""
    rng = np.random.default_rng(seed)
    steps = []
    for count in tokens:
        context = int(rng.integers(64, 4096))
        decodes = [(int(start), 1, True) for start in rng.integers(64, 4096, min(count, 256))]
        mixed = decodes[: max(1, count // 8)]
        chunk = count - len(mixed)
        batches = [[(0, count, True)], [(context, count, False)], [(0, count, False)]]
        if count <= len(decodes):
            batches.append(decodes)
        if chunk:
            batches.append([*mixed, (context, chunk, False)])
        for batch in batches:
            load = StepLoad.of(batch)
            steps.append(TimedStep(load, times.seconds(load)))
    return steps


def _split(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Every second token count is held out, the first and the last are not."""
    inner = tokens[1:-1]
    return [tokens[0], *inner[1::2], tokens[-1]], list(inner[::2])


def _knots(tokens: Sequence[int]) -> list[int]:
    """Token counts spaced by about an eighth: tile effects bend the curve between powers of two."""
    knots = [tokens[0]]
    for count in tokens:
        if count >= max(knots[-1] * 1.125, knots[-1] + _FEWEST_TOKENS_A_KNOT):
            knots.append(count)
    if knots[-1] != tokens[-1]:
        knots.append(tokens[-1])
    return knots


def _layer_times(path: Path, num_workers: int) -> dict[int, float]:
    """Seconds of one layer by number of tokens; several rows of a count are averaged."""
    found: dict[int, list[float]] = {}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if int(row["num_tensor_parallel_workers"]) == num_workers:
                total_ms = sum(float(row[f"time_stats.{name}.median"]) for name in _LAYER_OPERATORS)
                found.setdefault(int(row["num_tokens"]), []).append(total_ms / 1000)
    return {count: float(np.mean(values)) for count, values in found.items()}


def _all_reduce_times(path: Path, num_workers: int) -> tuple[list[int], list[float]]:
    """Sizes in bytes and seconds, of workers in one machine."""
    found: dict[int, list[float]] = {}
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if int(row["num_workers"]) == num_workers and int(row["devices_per_node"]) == num_workers:
                found.setdefault(int(row["size"]), []).append(
                    float(row["time_stats.all_reduce.median"]) / 1000
                )
    sizes = sorted(found)
    return sizes, [float(np.mean(found[size])) for size in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--profiles", type=Path, required=True, help="folder with the operator times")
    parser.add_argument("--out", type=Path, default=_OUT)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(
        "profile                     KV tokens  decode 1  32 x 1024  prefill 1024  2048   error (median, P95)"
    )
    for device, model, num_workers in _TARGETS:
        content = fit(device, model, num_workers, options.profiles)
        path = options.out / f"{content['name']}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        profile = CostProfile.parse(content["costs"], str(path))
        shapes = ([(512, 1, True)], [(1024, 1, True)] * 32, [(0, 1024, True)], [(0, 2048, True)])
        milliseconds = [profile.cost.step_time_s(StepLoad.of(shape)) * 1000 for shape in shapes]
        print(
            f"{content['name']:28s} {content['kv_tokens']:8d}",
            *(f"{value:9.1f}" for value in milliseconds),
            f"  {profile.error.median:.2%} {profile.error.p95:.2%}",
        )


if __name__ == "__main__":
    main()
