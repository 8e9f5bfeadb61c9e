"""Whether ``backfill serve`` refuses objectives that a run would meet, and accepts objectives that none can.

A server starts without a saved cost profile, measures a coarse one, and refines it by what it serves here. It
has no prefix cache: with one, hardly any TTFT is impossible for certain. Each of the random prompts is served
alone, which gives its TTFT. Another of its length is sent with an objective of one to two times that, which
must not be refused, and a third with a fifth of it, which a good profile may refuse. Refusals are counted by
the quality of the profile in use.

Usage: objectives.py [--prompts 200] [--longest 7900] [--seed 0]. Ends with one JSON object on a line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from served import cache_without_profiles, check_no_prefix_hits, get, served

OUTPUT_TOKENS = 4
IMPOSSIBLE = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--longest", type=int, default=7900, help="tokens; lengths are log-uniform")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    with (
        cache_without_profiles() as cache,
        served("--no-prefix-caching", environment={"BACKFILL_CACHE_ROOT": cache}) as port,
    ):
        for number in range(arguments.prompts):
            num_tokens = round(arguments.longest ** rng.uniform(0.3, 1.0))
            ask_about(port, num_tokens, rng, counts)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} prompts: {dict(counts)}", flush=True)
        check_no_prefix_hits(port)
        error = {
            quantile: sample(port, "cost_profile_error_ratio", f'quantile="{quantile}"')
            for quantile in ("0.5", "0.95")
        }
    load = os.getloadavg()[0]
    print(json.dumps({"benchmark": "objectives", **counts, "error": error, "load_average": load}))


def ask_about(port: int, num_tokens: int, rng: random.Random, counts: Counter[str]) -> None:
    """Serve a prompt, then send others with objectives that they can meet and with one that they cannot."""

    def prompt() -> list[int]:
        return [rng.randint(1000, 40_000) for _ in range(num_tokens)]  # not again: its KV may be cached

    measured = ask(port, prompt(), {"ttft": 1e6, "tpot": 1e6})
    assert measured is not None, "an objective of days was refused"
    ttft_s = measured["ttft"]
    qualities = ("coarse", "refined", "full")
    (quality,) = (name for name in qualities if sample(port, "cost_profile_info", f'quality="{name}"'))
    for kind, slo in (
        ("feasible", {"ttft": rng.uniform(1.0, 2.0) * ttft_s}),
        ("impossible", {"ttft": IMPOSSIBLE * ttft_s}),
    ):
        is_refused = ask(port, prompt(), slo) is None
        counts[f"{quality}_{kind}_{'refused' if is_refused else 'accepted'}"] += 1


def ask(port: int, prompt: list[int], slo: dict[str, float]) -> dict[str, Any] | None:
    """The answer's ``metrics``; None where the objectives were refused."""
    body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "slo": slo}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            metrics: dict[str, Any] = json.load(response)["metrics"]
            return metrics
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return None


def sample(port: int, name: str, label: str) -> float:
    """A metric's value with that label; 0 where there is none."""
    pattern = rf"backfill:{name}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)"
    found = re.search(pattern, get(port, "/metrics"))
    return 0.0 if found is None else float(found[1])


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
