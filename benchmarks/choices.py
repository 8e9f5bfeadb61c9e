"""What `auto` chooses on this machine beside everything else it could have chosen.

Runs ``backfill bench throughput`` with the defaults and with each other instruction set, type and number of
threads, one thing changed at a time, in alternating rounds. A choice beats the defaults if its median of a
figure is better by 10 %; the exit status is 1 then. Prints a table, and one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field

from machine_limits import processor_name

from backfill.engine.environment import engine_environment
from backfill.kernels.cpu import available_isas
from backfill.kernels.isa import ISA_VARIABLE

FIGURES = ("total_tok_s", "stream_tok_s", "first_token_s")
DEFAULTS = "defaults"
MOST_BETTER = 1.1


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def measure(self, work: list[str]) -> dict[str, float]:
        environment = {**os.environ, **self.environment}
        report = subprocess.run(
            [sys.executable, "-m", "backfill", "bench", "throughput", *work, *self.options],
            env={**environment, **engine_environment(environment)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        figures = json.loads(report.stdout.splitlines()[-1])
        return {name: figures[name] for name in FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=32)
    args = parser.parse_args()
    work = ["--num-prompts", str(args.num_prompts), "--input-len", str(args.input_len)]
    work += ["--output-len", str(args.output_len), "--stream-len", str(args.output_len)]
    choices = all_choices()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in choices}
    for number in range(args.rounds):
        names = list(choices)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            runs[name].append(choices[name].measure(work))
    medians = {
        name: {figure: statistics.median(run[figure] for run in of_choice) for figure in FIGURES}
        for name, of_choice in runs.items()
    }
    better = {name: gains(medians[name], medians[DEFAULTS]) for name in choices if name != DEFAULTS}
    for name, figures in medians.items():
        print(f"{name:28}", *(f"{figure} {value:9.3f}  " for figure, value in figures.items()))
    beaten = {
        name: [each for each, gain in found.items() if gain >= MOST_BETTER] for name, found in better.items()
    }
    beaten = {name: figures for name, figures in beaten.items() if figures}
    print(f"better than the defaults by 10 %: {beaten or 'nothing'}")
    result = {"benchmark": "choices", "date": time.strftime("%Y-%m-%d"), "processor": processor_name()}
    print(json.dumps(result | {"rounds": args.rounds, "medians": medians, "runs": runs, "better": beaten}))
    sys.exit(1 if beaten else 0)


def all_choices() -> dict[str, Choice]:
    choices = {DEFAULTS: Choice()}
    chosen = os.environ.get(ISA_VARIABLE) or available_isas()[-1]
    for isa in available_isas():
        if isa != chosen:
            choices[isa] = Choice(environment={ISA_VARIABLE: isa})
    choices["float32"] = Choice(("--dtype", "float32"))
    for threads in range(1, len(os.sched_getaffinity(0))):
        choices[f"{threads} threads"] = Choice(("--threads", str(threads)))
    return choices


def gains(figures: dict[str, float], defaults: dict[str, float]) -> dict[str, float]:
    """How many times better each figure is; the first token's is a time."""
    return {
        name: defaults[name] / value if name == "first_token_s" else value / defaults[name]
        for name, value in figures.items()
    }


if __name__ == "__main__":
    main()
