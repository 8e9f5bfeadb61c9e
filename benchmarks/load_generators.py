"""Three load generators against a Backfill server: ours, ``vllm bench serve`` and guidellm.

Each sends completions of 256 tokens in and 32 out at a constant rate, one generator after another for several
rounds. Figures are medians over the rounds. A generator takes some of the server's processors, so each mean
is also divided by the server's own of the same run, from ``/metrics`` before and after it. The server caches
no prefixes, since a generator sends the same prompts in every round.

    load_generators.py --vllm VL/bin/python --guidellm GL/bin/guidellm

A generator whose program is not given is left out. The last line of output is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from served import check_no_prefix_hits, get, served

from backfill.models.resolve import resolve_model

INPUT_LEN, OUTPUT_LEN = 256, 32
FIGURES = ("ttft_ms", "tpot_ms", "e2el_ms", "output_tok_s", "ttft_over_server", "tpot_over_server")

# One worker process is enough for this rate; guidellm's default of ten would starve the server.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}

# vLLM's own command line asks for the metadata of a package named vllm, which its CPU build lacks.
VLLM_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--vllm", type=Path, help="Python with vllm and its bench extra")
    parser.add_argument("--guidellm", type=Path, help="the guidellm program")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second")
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    generators: dict[str, Callable[[str], dict[str, float]]] = {
        "backfill": lambda url: run_backfill(args, url)
    }
    if args.vllm is not None:
        generators["vllm"] = lambda url: run_vllm(args, url, folder, served_name)
    if args.guidellm is not None:
        generators["guidellm"] = lambda url: run_guidellm(args, url, folder)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in generators}
    with served(args.model, "--no-prefix-caching") as port:
        url = f"http://127.0.0.1:{port}"
        served_name = json.loads(get(port, "/v1/models"))["data"][0]["id"]
        run_backfill(args, url)  # warm-up
        for round_number in range(args.rounds):
            for name, run in generators.items():
                before = server_totals(port)
                figures = run(url)
                runs[name].append(figures | over_server(figures, before, server_totals(port)))
                print(f"round {round_number + 1}: {name} {runs[name][-1]}", file=sys.stderr, flush=True)
        check_no_prefix_hits(port)
    medians = {
        name: {figure: statistics.median(run[figure] for run in own) for figure in FIGURES}
        for name, own in runs.items()
    }
    print(
        f"{args.num_prompts} requests at {args.rate:g}/s, means of a run, medians of {args.rounds} rounds\n"
    )
    print(f"| generator | {' | '.join(FIGURES)} |")
    print(f"| --- |{' ---: |' * len(FIGURES)}")
    for name, figures in medians.items():
        cells = []
        for figure in FIGURES:
            values = [run[figure] for run in runs[name]]
            spread = (max(values) - min(values)) / figures[figure]
            ratio = figures[figure] / medians["backfill"][figure]
            cells.append(f"{figures[figure]:.3f} ({ratio:.3f} x, spread {100 * spread:.0f} %)")
        print(f"| {name} | {' | '.join(cells)} |")
    print(
        json.dumps({"benchmark": "load_generators", "model": args.model, "generators": medians, "runs": runs})
    )


def server_totals(port: int) -> dict[str, float]:
    """Sums and counts of the server's histograms of TTFT and inter-token latency, in seconds."""
    text = get(port, "/metrics")
    found = re.findall(
        r'^backfill:(time_to_first_token|inter_token_latency)_seconds_(sum|count)\{class="online".* (\S+)$',
        text,
        re.MULTILINE,
    )
    return {f"{name}_{part}": float(value) for name, part, value in found}


def over_server(
    figures: dict[str, float], before: dict[str, float], after: dict[str, float]
) -> dict[str, float]:
    gained = {key: after[key] - before.get(key, 0.0) for key in after}

    def mean_ms(name: str) -> float:
        return 1e3 * gained[f"{name}_sum"] / gained[f"{name}_count"]

    return {
        "ttft_over_server": figures["ttft_ms"] / mean_ms("time_to_first_token"),
        "tpot_over_server": figures["tpot_ms"] / mean_ms("inter_token_latency"),
    }


def run_backfill(args: argparse.Namespace, url: str) -> dict[str, float]:
    command = (
        f"-m backfill bench serve --base-url {url} --backend openai --burstiness inf --json --no-progress"
    )
    found = last_json([sys.executable, *command.split(), *work(args)])
    return from_vllm_keys(found)


def run_vllm(args: argparse.Namespace, url: str, folder: Path, served_name: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as results:
        options = (
            f"--backend openai --base-url {url} --dataset-name random --burstiness 1e9 --disable-tqdm "
            f"--percentile-metrics ttft,tpot,itl,e2el --save-result --result-filename result.json"
        )
        # Not in the text that is split: these may contain spaces.
        places = ["--model", served_name, "--tokenizer", str(folder), "--result-dir", results]
        run([str(args.vllm), "-c", VLLM_BENCH_SERVE, *options.split(), *places, *work(args)])
        return from_vllm_keys(json.loads((Path(results) / "result.json").read_text()))


def run_guidellm(args: argparse.Namespace, url: str, folder: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as results:
        path = Path(results) / "result.json"
        options = (
            f"--backend kind=openai_http,target={url},request_format=/v1/completions "
            f"--profile kind=constant,rate={args.rate:g} "
            f"--constraint kind=max_requests,count={args.num_prompts} "
            f"--data kind=synthetic_text,prompt_tokens={INPUT_LEN},output_tokens={OUTPUT_LEN} "
            f"--tokenizer kind=huggingface_auto,model={folder} "
            f"--output kind=json,path={path} --disable-console"
        )
        run([str(args.guidellm), "run", *options.split()])
        metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]

    def mean(name: str) -> float:
        return float(metrics[name]["successful"]["mean"])

    return {
        "ttft_ms": mean("time_to_first_token_ms"),
        "tpot_ms": mean("inter_token_latency_ms"),  # guidellm's "TPOT" includes the first token
        "e2el_ms": 1e3 * mean("request_latency"),
        "output_tok_s": mean("output_tokens_per_second"),
    }


def work(args: argparse.Namespace) -> list[str]:
    return (
        f"--request-rate {args.rate:g} --num-prompts {args.num_prompts} --random-input-len {INPUT_LEN} "
        f"--random-output-len {OUTPUT_LEN} --ignore-eos --seed 0"
    ).split()


def from_vllm_keys(result: dict[str, Any]) -> dict[str, float]:
    return {
        "ttft_ms": result["mean_ttft_ms"],
        "tpot_ms": result["mean_tpot_ms"],
        "e2el_ms": result["mean_e2el_ms"],
        "output_tok_s": result["output_throughput"],
    }


def last_json(command: list[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(run(command).splitlines()[-1])
    return answer


def run(command: list[str]) -> str:
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:3])} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
