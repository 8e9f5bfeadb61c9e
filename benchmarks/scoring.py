"""lm-eval on a server of ours beside lm-eval on transformers: the same tasks, the same figures.

Two tasks from local files, which are written here: sums (multiple choice), and the perplexity of this
repository's documents. The model runs in float32. Figures must agree in every digit that lm-eval shows, of a
figure above 100 in as many as float32 carries (1e-6 of it), and each request's log likelihood within
--tolerance; else the exit status is 1.

    scoring.py --python LM_EVAL_ENV/bin/python

The environment has `lm-eval[api,hf]`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from as_safetensors import as_safetensors
from served import served

from backfill.models.resolve import DEFAULT_MODEL, resolve_model

NUM_SUMS = 40
OFFSETS = (0, 1, -2, 10)  # of the choices, from the sum
NUM_TEXTS = 8
TEXT_CHARS = 1500
SHOWN_DIGITS = 4  # by lm-eval
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
        theirs = evaluate("hf", pretrained=copied, dtype="float32")
        with served(str(folder), "--dtype", "float32", "--served-model-name", "m") as port:
            ours = evaluate(
                "local-completions",
                base_url=f"http://127.0.0.1:{port}/v1/completions",
                model="m",
                tokenizer=folder,
                num_concurrent=4,
            )
    sys.exit(not agree(ours, theirs, arguments.tolerance))


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
    for name, kind, rows in (("sums", CHOICES, questions), ("documents", TEXTS, texts)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(TASK.format(file=file, name=name) + kind, encoding="utf-8")


class Evaluation:
    """Runs lm-eval on the tasks of a folder."""

    def __init__(self, python: Path, tasks: Path) -> None:
        self._python = python
        self._tasks = tasks

    def __call__(self, model: str, /, **model_args: object) -> tuple[dict[str, Any], list[float]]:
        """The figures by name, and the log likelihoods of all requests in their order."""
        output = self._tasks / model
        command: Sequence[object] = [
            *(self._python, "-m", "lm_eval", "run", "--model", model, "--device", "cpu"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())),
            *("--tasks", "sums,documents", "--include_path", self._tasks),
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
            json.loads(line)
            for path in sorted(output.rglob("samples_*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        samples.sort(key=lambda sample: (sample["target"], sample["doc_id"]))
        return figures, [value for sample in samples for value in _likelihoods(sample["resps"])]


def _likelihoods(responses: Any) -> list[float]:
    """The numbers in a sample's responses, which lm-eval nests and may write as text."""
    if isinstance(responses, list):
        return [value for each in responses for value in _likelihoods(each)]
    try:
        return [float(responses)]
    except ValueError:  # whether the text is greedy
        return [float(responses == "True")]


def agree(
    ours: tuple[dict[str, Any], list[float]], theirs: tuple[dict[str, Any], list[float]], tolerance: float
) -> bool:
    same = True
    for name, value in theirs[0].items():
        shown = [f"{figure:.{SHOWN_DIGITS}f}" for figure in (ours[0][name], value)]
        same &= shown[0] == shown[1] or (value > 100 and math.isclose(ours[0][name], value, rel_tol=1e-6))
        print(f"{name:<40} backfill {shown[0]:>12}   transformers {shown[1]:>12}")
    pairs = list(zip(ours[1], theirs[1], strict=True))
    farthest = max(abs(a - b) for a, b in pairs)
    print(f"{len(pairs)} values of requests, at most {farthest:.2g} apart")
    return same and farthest <= tolerance


if __name__ == "__main__":
    main()
