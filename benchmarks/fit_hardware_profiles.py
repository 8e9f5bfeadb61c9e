"""Hardware profiles for the simulator, fitted to published A100 operator times.

Reads the operator and all-reduce times that microsoft/vidur published (MIT), models what they leave out,
builds timed steps from the sums and fits a cost model to them. Operators of models that were not measured
are derived from a measured model's by FLOPs and bytes. Each profile's provenance and
docs/hardware-profiles.md say what is measured, derived and modelled. Prints the error on token counts that
were held out, a table of steps to compare with published figures, and how well measured models are derived
from one another.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import clone  # noqa: F401
import numpy as np

from backfill.core.measured_on import MeasuredOn
from backfill.costs.fit import TimedStep, fit_cost_model, fit_error
from backfill.costs.load import StepLoad
from backfill.costs.model import CostModel
from backfill.costs.profile import CopySpeed, CostProfile, FitError
from experiments.model_work import (
    ACTIVATIONS_BYTES,
    BANDWIDTH_FRAC,
    FLOPS_FRAC,
    GIB,
    LAYER_OPERATORS,
    MEMORY_FRAC,
    VALUE_BYTES,
    Device,
    ModelShape,
    kv_write_bytes,
    modelled_time_s,
    operator_work,
)

PEAK_FLOPS = 312e12  # fp16 tensor cores, NVIDIA A100 datasheet
KERNEL_GAP_S = 1e-6

MODELLED_KERNELS = 2  # of a layer: the KV write and attention

# Products are computed in tiles of 64 or 128 rows, so time jumps just above their multiples, where the tables
# have steps of 8.
JUMPS = (64, *range(128, 1024, 128))
ROW_KNOTS = (1, 16, *(at for jump in JUMPS for at in (jump, jump + 8)), 1024, 1280, 1536, 2048, 3072, 4096)
ROW_KNOTS += (8192, 16384, 32768)
SAMPLED_KNOTS = (1, 64, 104, 136, 256, 512)


@dataclass(frozen=True, slots=True)
class TabledShape(ModelShape):
    """A model's sizes, and where its operator times come from.

    Attributes:
        table: file of the measured operator times of this model, or of ``derived_from``.
        derived_from: measured model whose times are scaled to this one, which was not measured.
    """

    table: str = ""
    derived_from: TabledShape | None = None

    @property
    def layer_kernels(self) -> int:
        return sum(self.layer_operators.values()) + MODELLED_KERNELS


@dataclass(frozen=True, slots=True)
class Target:
    """A model on one or more devices."""

    shape: TabledShape
    device: Device
    num_devices: int
    copy_bytes_per_s: float

    @property
    def parallel(self) -> str:
        return f"-tp{self.num_devices}" if self.num_devices > 1 else ""

    @property
    def name(self) -> str:
        return f"{self.device.name}-{self.shape.name}{self.parallel}"

    @property
    def kv_tokens(self) -> int:
        usable = self.num_devices * self.device.usable_bytes
        return int((usable - self.shape.weight_bytes) / self.shape.kv_bytes_per_token)


LLAMA_2_7B = TabledShape("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, table="a100_llama-2-7b_mlp.csv")
LLAMA_3_8B = TabledShape("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, table="a100_llama-3-8b_mlp.csv")
LLAMA_3_70B = TabledShape(
    "llama-3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, table="a100_llama-3-70b_mlp.csv"
)


def opt(name: str, num_layers: int, hidden: int, num_heads: int) -> TabledShape:
    """An OPT model (Zhang et al., 2022, table 1).

    A device's part of a layer, with two devices for 13B and four for 30B, has 3/4 of the weights of a whole
    layer of Llama-2-7B: of all measured parts the nearest.
    """
    source = LLAMA_2_7B
    return TabledShape(
        name, num_layers, hidden, num_heads, num_heads, 4 * hidden, 50272, 2048, True, source.table, source
    )


OPT_13B = opt("opt-13b", 40, 5120, 40)
OPT_30B = opt("opt-30b", 48, 7168, 56)
A100_40G = Device("a100-40g", 39.4 * GIB, 1.555e12, PEAK_FLOPS)
A100_80G = Device("a100-80g", 79.2 * GIB, 2.039e12, PEAK_FLOPS)
MEASURED_DEVICE = A100_80G
PCIE_BYTES_PER_S = 25e9  # PCIe 4.0 x16: 32 GB/s nominal (ConServe, section 4.4), about 25 reached
TARGETS = (
    Target(LLAMA_2_7B, A100_40G, 1, PCIE_BYTES_PER_S),
    Target(LLAMA_3_8B, A100_40G, 1, PCIE_BYTES_PER_S),
    Target(LLAMA_2_7B, A100_80G, 1, PCIE_BYTES_PER_S),
    Target(LLAMA_3_8B, A100_80G, 1, PCIE_BYTES_PER_S),
    # In a DGX A100 two GPUs share a switch's x16 link to the host.
    Target(LLAMA_3_70B, A100_80G, 8, 4 * PCIE_BYTES_PER_S),
    Target(LLAMA_3_70B, A100_80G, 4, 2 * PCIE_BYTES_PER_S),
    # In a server of four GPUs each has a link of its own. BROS's testbed (section 7.1).
    Target(OPT_13B, A100_40G, 2, 2 * PCIE_BYTES_PER_S),
    Target(OPT_30B, A100_40G, 4, 4 * PCIE_BYTES_PER_S),
)
# Measured models, and devices they are spread over, that are derived from Llama-2-7B to see the error.
DERIVED_CHECKS = ((LLAMA_2_7B, 2), (LLAMA_3_8B, 1), (LLAMA_3_70B, 4), (LLAMA_3_70B, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=Path, required=True, help="folder of the operator times")
    parser.add_argument("--out", type=Path, default=Path("src/backfill/costs/hardware_profiles"))
    parser.add_argument("--collectives", type=Path, default=Path("src/backfill/costs/collectives"))
    args = parser.parse_args()
    print(HEADINGS)
    args.out.mkdir(parents=True, exist_ok=True)
    for target in TARGETS:
        all_reduce = read_all_reduce(args.profiles / "a100_dgx_all_reduce.csv", target.num_devices)
        operators = operators_of(target.shape, target.num_devices, args.profiles)
        content = fit_target(target, operators, all_reduce)
        path = args.out / f"{target.name}.json"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        profile = CostProfile.parse(content["costs"], str(path))
        print_row(target, profile, rows_error(profile.cost, target, operators, all_reduce))
    path = args.collectives / "a100-dgx.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(collectives(args.profiles), indent=1) + "\n", encoding="utf-8")
    print("\na layer's operators, derived from llama-2-7b's, against the measured ones: median, P95")
    source = read_operators(args.profiles / LLAMA_2_7B.table, 1)
    for shape, num_devices in DERIVED_CHECKS:
        measured = read_operators(args.profiles / shape.table, num_devices)
        error = derivation_error(shape, num_devices, source, measured)
        print(f"{shape.name} on {num_devices}: {error.median:.1%}, {error.p95:.1%} ({error.num_steps})")


def operators_of(shape: TabledShape, num_devices: int, folder: Path) -> dict[int, dict[str, float]]:
    """Seconds of each operator by number of tokens, measured or derived."""
    if shape.derived_from is None:
        return read_operators(folder / shape.table, num_devices)
    return derived_operators(shape.derived_from, shape, num_devices, read_operators(folder / shape.table, 1))


def derived_operators(
    source: TabledShape, shape: TabledShape, num_devices: int, measured: Mapping[int, Mapping[str, float]]
) -> dict[int, dict[str, float]]:
    """Times of one of the devices that share ``shape``, from those of ``source`` on one device.

    An operator takes as many times its roofline as the measured one at the same number of tokens. The
    roofline is the longer of its FLOPs at 312 TFLOP/s and its bytes at the device's nominal bandwidth.
    """
    derived = {}
    for num_tokens, seconds in measured.items():
        before, after = operator_work(source, num_tokens, 1), operator_work(shape, num_tokens, num_devices)
        derived[num_tokens] = {
            name: seconds[name]
            * after[name].roofline_s(MEASURED_DEVICE)
            / before[name].roofline_s(MEASURED_DEVICE)
            for name in after
        }
    return derived


def derivation_error(
    shape: TabledShape,
    num_devices: int,
    source: Mapping[int, Mapping[str, float]],
    measured: Mapping[int, Mapping[str, float]],
) -> FitError:
    """Error of a layer's derived operators, summed, at the token counts of both tables."""
    derived = derived_operators(LLAMA_2_7B, shape, num_devices, source)
    errors = []
    for num_tokens in derived.keys() & measured.keys():
        times = [
            sum(each[num_tokens][name] * count for name, count in shape.layer_operators.items())
            for each in (derived, measured)
        ]
        errors.append(abs(times[0] - times[1]) / times[1])
    return FitError(float(np.median(errors)), float(np.percentile(errors, 95)), len(errors))


def read_operators(path: Path, num_devices: int) -> dict[int, dict[str, float]]:
    """Median seconds of each operator by number of tokens; the mean where a count occurs twice."""
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if int(row["num_tensor_parallel_workers"]) == num_devices:
                for operator in ("emb", *LAYER_OPERATORS):
                    median_ms = float(row[f"time_stats.{operator}.median"])
                    found[int(row["num_tokens"])][operator].append(median_ms / 1000)
    return {
        num_tokens: {operator: fmean(times) for operator, times in found[num_tokens].items()}
        for num_tokens in sorted(found)
    }


def read_all_reduce(path: Path, num_devices: int) -> tuple[list[float], list[float]]:
    """Sizes in bytes, ascending, and the seconds of an all-reduce among devices of one machine.

    Medians of up to 300 kB are about 35 or about 60 us, also for neighbouring sizes, perhaps because the
    devices did not start together. So each is lowered to the least of any larger size, which makes them
    ascend. Both are empty for one device.
    """
    with path.open(newline="") as file:
        found = sorted(
            (float(row["size"]), float(row["time_stats.all_reduce.median"]) / 1000)
            for row in csv.DictReader(file)
            if row["num_workers"] == row["devices_per_node"] == str(num_devices)
        )
    if not found:
        return [], []
    lowest = np.minimum.accumulate([seconds for _, seconds in reversed(found)])[::-1]
    return [size for size, _ in found], lowest.tolist()


def collectives(folder: Path) -> dict[str, object]:
    """Seconds of an all-reduce by bytes, at powers of two, for each number of devices of a machine."""
    all_reduce = {}
    for num_devices in (2, 4, 8):
        sizes, seconds = read_all_reduce(folder / "a100_dgx_all_reduce.csv", num_devices)
        at = [float(1 << power) for power in range(11, 27) if sizes[0] <= 1 << power <= sizes[-1]]
        times = [float(f"{each:.4g}") for each in np.interp(at, sizes, seconds)]
        all_reduce[str(num_devices)] = {"x": at, "y": times}
    return {
        "provenance": "Measured (microsoft/vidur profiling data, MIT; a100_dgx_all_reduce.csv): medians of "
        "all-reduces among devices of one DGX A100, each lowered to the least median of any larger size. "
        "Made by benchmarks/fit_hardware_profiles.py.",
        "all_reduce": all_reduce,
    }


def fit_target(
    target: Target, operators: Mapping[int, dict[str, float]], all_reduce: tuple[list[float], list[float]]
) -> dict[str, object]:
    """The profile as it is stored, with numbers rounded to six digits."""
    row_knots = [knot for knot in ROW_KNOTS if knot <= max(operators)]
    rows_s = {
        num_tokens: rows_time_s(target, num_tokens, times, all_reduce)
        for num_tokens, times in operators.items()
    }
    held_out = held_out_tokens(operators)
    steps = [step for n in operators if n not in held_out for step in timed_steps(target, n, rows_s[n])]
    unseen = [step for n in held_out for step in timed_steps(target, n, rows_s[n])]
    cost = fit_cost_model(steps, row_knots, SAMPLED_KNOTS)
    costs = CostProfile(
        key=MeasuredOn(target.shape.name, target.device.name + target.parallel, "float16"),
        quality="full",
        num_layers=target.shape.num_layers,
        cost=cost,
        error=fit_error(cost, unseen),
        known_tokens=target.shape.max_model_len,
        known_chunk_tokens=min(target.shape.max_model_len, row_knots[-1]),
        copies=CopySpeed(target.copy_bytes_per_s, target.copy_bytes_per_s),
        provenance=provenance(target),
    )
    content = {
        "costs": costs.content(),
        "kv_tokens": target.kv_tokens,
        "kv_bytes_per_token": target.shape.kv_bytes_per_token,
        "max_model_len": target.shape.max_model_len,
    }
    rounded: dict[str, object] = json.loads(
        json.dumps(content), parse_float=lambda text: float(f"{float(text):.6g}")
    )
    return rounded


def held_out_tokens(operators: Iterable[int]) -> set[int]:
    """Every other measured token count that is not a knot."""
    return set([num_tokens for num_tokens in operators if num_tokens not in ROW_KNOTS][::2])


def rows_time_s(
    target: Target,
    num_tokens: int,
    measured_s: Mapping[str, float],
    all_reduce: tuple[list[float], list[float]],
) -> float:
    """Seconds of a step without attention and output. KV writes and gaps between kernels are modelled."""
    shape, tp = target.shape, target.num_devices
    seconds = {
        name: on_device(target.device, work.num_bytes, measured_s[name])
        for name, work in operator_work(shape, num_tokens, tp).items()
    }
    layer = sum(seconds[name] * count for name, count in shape.layer_operators.items())
    layer += shape.layer_kernels * KERNEL_GAP_S
    layer += kv_write_bytes(shape, num_tokens) / tp / target.device.memory_rate
    if tp > 1:
        layer += 2 * (interpolate(num_tokens * shape.hidden * VALUE_BYTES, *all_reduce) + KERNEL_GAP_S)
    return seconds["emb"] + shape.num_layers * layer


def on_device(device: Device, num_bytes: float, measured_s: float) -> float:
    """Seconds of an operator on a device of another bandwidth and the same arithmetic.

    An operator takes its measured time, or the time to move its bytes here if that is longer, but at most the
    measured time times the ratio of bandwidths: some of its bytes may have come from a cache.
    """
    at_most = measured_s * MEASURED_DEVICE.bandwidth / device.bandwidth
    return max(measured_s, min(at_most, num_bytes / device.memory_rate))


def interpolate(at: float, x: list[float], y: list[float]) -> float:
    """Linear; beyond the largest ``x`` with the slope of the upper half, where links bound an all-reduce."""
    if at <= x[-1]:
        return float(np.interp(at, x, y))
    middle = len(x) // 2
    return y[-1] + (at - x[-1]) * (y[-1] - y[middle]) / (x[-1] - x[middle])


def timed_steps(target: Target, num_tokens: int, rows_s: float) -> list[TimedStep]:
    """Steps of ``num_tokens``: prefills, chunks with a context, decodes, and mixtures."""
    longest = target.shape.max_model_len
    contexts = [context for context in (0, 512, 2048, longest // 2) if num_tokens + context <= longest]
    steps = [[(context, num_tokens, sampled)] for context in contexts for sampled in (True, False)]
    if not steps:  # longer than a sequence may be: several sequences
        whole, rest = divmod(num_tokens, longest)
        steps.append([(0, longest, True)] * whole + ([(0, rest, True)] if rest else []))
    if num_tokens <= max(SAMPLED_KNOTS):
        steps += [[(context, 1, True)] * num_tokens for context in (128, 1024, longest - 1)]
    num_decodes = min(num_tokens // 2, 64)
    if num_decodes and num_tokens - num_decodes <= longest // 2:
        chunk = num_tokens - num_decodes
        steps += [[(1024, 1, True)] * num_decodes + [(start, chunk, False)] for start in (0, longest // 2)]
    loads = [StepLoad.of(slices) for slices in steps]
    return [
        TimedStep(load, rows_s + modelled_time_s(target.shape, target.device, target.num_devices, load))
        for load in loads
    ]


def provenance(target: Target) -> str:
    shape = target.shape
    source = shape.derived_from or shape
    parts = [
        f"Measured (microsoft/vidur profiling data, MIT; {source.table}): median kernel times of the "
        f"operators of a {source.name} layer but attention, at "
        f"{1 if shape.derived_from else target.num_devices} device(s) a model, on an "
        "A100 that the data does not name further; its weight reads reach 1.6 TB/s, more than an A100-40G "
        "can, so the 80 GB SXM (2.039 TB/s) is assumed."
    ]
    if shape.derived_from:
        parts.append(
            f"Derived: {shape.name} was not measured. Each operator on one of {target.num_devices} devices "
            f"takes the time of {source.name}'s at the same number of tokens, times the ratio of their "
            "rooflines (the longer of FLOPs at 312 TFLOP/s and bytes at 2.039 TB/s). Biases are left out. "
            "Layers of measured models derived so differ from their measurement by as much as "
            "docs/hardware-profiles.md says, which is not in this profile's error."
        )
    if target.num_devices > 1:
        parts.append(
            "Measured too (a100_dgx_all_reduce.csv): two all-reduces a layer among "
            f"{target.num_devices} devices of a DGX A100, "
            "each lowered to the least median of any larger size, extrapolated beyond 64 MiB."
        )
    if target.device is not MEASURED_DEVICE:
        parts.append(
            "Scaled: operators bound by moving their bytes at 80% of 1.555 TB/s were slowed to that, by "
            "2.039/1.555 at most."
        )
    parts.append(
        "Modelled: attention, KV writes and the output projection with sampling, from bytes at "
        f"{BANDWIDTH_FRAC:.0%} of the memory's bandwidth and FLOPs at {FLOPS_FRAC:.0%} of 312 TFLOP/s; gaps "
        f"of {KERNEL_GAP_S * 1e6:g} us between kernels, as the times are of kernels without their launch. No "
        f"host time is in it. KV memory: {MEMORY_FRAC:.0%} of what CUDA reports less fp16 weights and "
        f"{ACTIVATIONS_BYTES / GIB:g} GiB a device. Error: on token counts of the table that were not fitted "
        "on; attention is modelled in both. Made by benchmarks/fit_hardware_profiles.py."
    )
    return " ".join(parts)


def rows_error(
    cost: CostModel,
    target: Target,
    operators: Mapping[int, dict[str, float]],
    all_reduce: tuple[list[float], list[float]],
) -> FitError:
    """Error of the row-wise part at held-out token counts, without attention, which both sides share."""
    errors = []
    for num_tokens in held_out_tokens(operators):
        rows_s = rows_time_s(target, num_tokens, operators[num_tokens], all_reduce)
        errors.append(abs(cost.rows_s(num_tokens) - rows_s) / rows_s)
    return FitError(float(np.median(errors)), float(np.percentile(errors, 95)), len(errors))


HEADINGS = (
    f"{'':26} {'steps held out':>20}  {'rows alone':>20}    decode"
    f"  prefill 512   1024   2048  tokens/s    decode  KV tokens\n"
    f"{'':26} {'median, P95 (number)':>20}  {'median, P95 (number)':>20}    1 (ms)"
    f"  {'(ms)':>11} {'(ms)':>6} {'(ms)':>6}   at 2048  32 x 1024"
)


def print_row(target: Target, profile: CostProfile, rows: FitError) -> None:
    def milliseconds(slices: list[tuple[int, int, bool]]) -> float:
        return 1000 * profile.cost.step_time_s(StepLoad.of(slices))

    prefill = [milliseconds([(0, num_tokens, True)]) for num_tokens in (512, 1024, 2048)]
    errors = [f"{each.median:.1%} {each.p95:.1%} ({each.num_steps})" for each in (profile.error, rows)]
    print(
        f"{target.name:26} {errors[0]:>20}  {errors[1]:>20}  {milliseconds([(512, 1, True)]):8.1f}"
        f"  {prefill[0]:11.1f} {prefill[1]:6.1f} {prefill[2]:6.1f}  {2048 / prefill[2] * 1000:8.0f}"
        f"  {milliseconds([(1024, 1, True)] * 32):8.1f}  {target.kv_tokens:9}"
    )


if __name__ == "__main__":
    main()
