"""lm-eval on a server of ours and on `run-batch`, beside lm-eval on transformers: the same figures.

Three tasks from local files, which are written here: sums (multiple choice), the same sums as written answers
(generate_until), and the perplexity of this repository's documents. Model and weights are float32. Figures
must agree in every digit that lm-eval shows, those above 100 in as many as float32 carries (1e-6 of them),
each request's log likelihood within --tolerance, and each written answer whole; else the exit status is 1.

lm-eval knows servers alone, so what it sends is passed on to the server by a relay. Then `run-batch` answers
the same bodies as lines of a batch, and the relay gives its answers to a second run of lm-eval.

    scoring.py --python LM_EVAL_ENV/bin/python

The environment has `lm-eval[api,hf]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import torch
from as_safetensors import as_safetensors
from served import served

from backfill.models.resolve import DEFAULT_MODEL, resolve_model

NUM_SUMS = 40
OFFSETS = (0, 1, -2, 10)  # of the choices, from the sum
NUM_TEXTS = 8
TEXT_CHARS = 1500
SHOWN_DIGITS = 4  # by lm-eval
OPTIONS = ("--dtype", "float32", "--quantization", "none", "--served-model-name", "m")
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
task: {name}
"""
CHOICES = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWERS = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TEXTS = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="interpreter of lm-eval's environment")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tolerance", type=float, default=1e-3)
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    with tempfile.TemporaryDirectory() as tasks:
        write_tasks(Path(tasks))
        evaluate = Evaluation(arguments.python, Path(tasks))
        copied = as_safetensors(folder, Path(tasks) / "model", torch.float32)
        theirs = evaluate("hf", "hf", pretrained=copied, dtype="float32")
        with Relay.running() as relay:
            client = {"base_url": relay.url, "model": "m", "tokenizer": folder, "num_concurrent": 4}
            with served(str(folder), *OPTIONS) as port:
                relay.port = port
                ours = evaluate("server", "local-completions", **client)
            relay.answers = run_batch(folder, relay.answers, Path(tasks))
            relay.port = None
            batch = evaluate("batch", "local-completions", **client)
    same = [agree(each, theirs, arguments.tolerance) for each in (ours, batch)]
    sys.exit(not all(same))


class Relay(ThreadingHTTPServer):
    """Passes bodies on to the server at ``port``, and keeps the answers; without a port it gives these."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1/completions"
        self.port: int | None = None
        self.answers: dict[bytes, bytes] = {}

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[Relay]:
        with cls() as relay:
            threading.Thread(target=relay.serve_forever, daemon=True).start()
            yield relay
            relay.shutdown()

    def answer(self, body: bytes) -> bytes:
        """Raises: KeyError for a body that has no answer, OSError."""
        if self.port is not None:
            url = f"http://127.0.0.1:{self.port}/v1/completions"
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=300) as response:
                self.answers[body] = response.read()
        return self.answers[body]


class _Passing(BaseHTTPRequestHandler):
    server: Relay

    def do_POST(self) -> None:
        answer = self.server.answer(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Nothing of what goes well."""


def run_batch(folder: Path, bodies: Sequence[bytes] | dict[bytes, bytes], work: Path) -> dict[bytes, bytes]:
    """What ``run-batch`` answers to bodies of completions. Raises: CalledProcessError, KeyError."""
    lines = [
        {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": json.loads(body)}
        for index, body in enumerate(bodies)
    ]
    asked, answered = work / "batch.jsonl", work / "batch.results.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "backfill", "run-batch", "-i", asked, "-o", answered]
    subprocess.run([str(each) for each in (*command, "--model", folder, *OPTIONS)], check=True)
    results = [json.loads(line) for line in answered.read_text(encoding="utf-8").splitlines()]
    by_id = {result["custom_id"]: json.dumps(result["response"]["body"]).encode() for result in results}
    return {body: by_id[str(index)] for index, body in enumerate(bodies)}


def write_tasks(folder: Path) -> None:
    questions = []
    for index in range(NUM_SUMS):
        first, second = 7 + 3 * index, 91 - 2 * index
        choices = [str(first + second + offset) for offset in OFFSETS]
        answer = index % len(choices)
        choices[0], choices[answer] = choices[answer], choices[0]
        questions.append({"question": f"{first} + {second} =", "choices": choices, "answer": answer})
    documents = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))[:NUM_TEXTS]
    texts = [{"text": path.read_text(encoding="utf-8")[:TEXT_CHARS]} for path in documents]
    for name, kind, rows in (
        ("sums", CHOICES, questions),
        ("answers", ANSWERS, questions),
        ("documents", TEXTS, texts),
    ):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(TASK.format(file=file, name=name) + kind, encoding="utf-8")


class Evaluation:
    """Runs lm-eval on the tasks of a folder."""

    def __init__(self, python: Path, tasks: Path) -> None:
        self._python = python
        self._tasks = tasks

    def __call__(self, name: str, model: str, /, **model_args: object) -> Evaluated:
        """``name``: of the run, another one each."""
        output = self._tasks / name
        command: Sequence[object] = [
            *(self._python, "-m", "lm_eval", "run", "--model", model, "--device", "cpu"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())),
            *("--tasks", "sums,answers,documents", "--include_path", self._tasks),
            *("--output_path", output, "--log_samples"),
        ]
        subprocess.run([str(each) for each in command], check=True)
        (results,) = output.rglob("results_*.json")
        found = json.loads(results.read_text())
        print(f"lm-eval {found['lm_eval_version']}, transformers {found['transformers_version']}: {model}")
        figures = {
            f"{task} {name.removesuffix(',none')}": value
            for task, values in found["results"].items()
            for name, value in values.items()
            if isinstance(value, float)
        }
        samples = [
            (path.name.split("_20")[0], json.loads(line))
            for path in sorted(output.rglob("samples_*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        samples.sort(key=lambda sample: (sample[0], sample[1]["doc_id"]))
        return Evaluated(name, figures, [value for _, each in samples for value in _values(each["resps"])])


class Evaluated(NamedTuple):
    """``figures`` by name; ``responses`` of all requests, in their order."""

    name: str
    figures: dict[str, float]
    responses: list[float | str]


def _values(responses: Any) -> list[float | str]:
    """What a sample's responses have, which lm-eval nests, and of which it may write numbers as text."""
    if isinstance(responses, list):
        return [value for each in responses for value in _values(each)]
    try:
        return [float(responses)]
    except ValueError:  # whether the text is greedy, or what was written
        return [str(responses)]


def agree(ours: Evaluated, theirs: Evaluated, tolerance: float) -> bool:
    same = ours.figures.keys() == theirs.figures.keys()
    for name, value in theirs.figures.items():
        figure = ours.figures[name]
        shown = [f"{each:.{SHOWN_DIGITS}f}" for each in (figure, value)]
        same &= shown[0] == shown[1] or (value > 100 and math.isclose(figure, value, rel_tol=1e-6))
        print(f"{name:<40} {ours.name} {shown[0]:>12}   transformers {shown[1]:>12}")
    pairs = list(zip(ours.responses, theirs.responses, strict=True))
    gaps = [abs(a - b) for a, b in pairs if isinstance(a, float) and isinstance(b, float)]
    texts = [(a, b) for a, b in pairs if isinstance(a, str) or isinstance(b, str)]
    differing = [pair for pair in texts if pair[0] != pair[1]]
    print(f"{len(gaps)} numbers, at most {max(gaps):.2g} apart; {len(texts)} texts, {len(differing)} differ")
    for pair in differing:
        print(*map(repr, pair), sep="\n")
    return same and not differing and max(gaps) <= tolerance


if __name__ == "__main__":
    main()
