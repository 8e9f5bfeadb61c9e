"""What ``bench serve`` shows of a run, and which files it writes."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backfill.bench.endpoint import parse_pairs
from backfill.bench.metrics import Metrics, compute_metrics, parse_objectives
from backfill.bench.report import TITLES, format_report, json_line, result_json
from backfill.bench.runner import Run
from backfill.core.errors import ConfigError
from backfill.core.options import check_types


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """Objectives, and the figures to show.

    Attributes:
        goodput: objectives in ms, such as ttft:1000 tpot:50; also itl (the longest gap) and e2el.
        ttft_slo: the same as `goodput` ttft:MS.
        tpot_slo: the same as `goodput` tpot:MS.
        percentile_metrics: figures to show, of ttft, tpot, itl, e2el, normalized_latency and
            client_queue_time.
        metric_percentiles: percentiles to show, separated by commas.
    """

    goodput: tuple[str, ...] = ()
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    percentile_metrics: str = "ttft,tpot,itl,e2el,normalized_latency"
    metric_percentiles: str = "50,90,99"

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        self.objectives_s()
        self.shown_figures()
        self.percentiles()

    def objectives_s(self) -> dict[str, float]:
        """Bounds in seconds by name. Raises: ConfigError."""
        objectives = parse_objectives(self.goodput, "goodput")
        for field, name, bound_ms in (
            ("ttft_slo", "ttft", self.ttft_slo),
            ("tpot_slo", "tpot", self.tpot_slo),
        ):
            if bound_ms is not None:
                objectives |= parse_objectives([f"{name}:{bound_ms}"], field)
        return objectives

    def shown_figures(self) -> tuple[str, ...]:
        """Names of ``TITLES``. Raises: ConfigError."""
        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        for name in names:
            if name not in TITLES:
                raise ConfigError(f"`percentile_metrics` must be one of {', '.join(TITLES)}, got {name!r}.")
        return names

    def percentiles(self) -> tuple[float, ...]:
        """Numbers from 0 to 100, ascending. Raises: ConfigError."""
        try:
            values = sorted({float(part) for part in self.metric_percentiles.split(",")})
        except ValueError:
            values = [math.nan]
        if not all(0 <= value <= 100 for value in values):
            raise ConfigError(
                "`metric_percentiles` takes numbers from 0 to 100, such as 50,90,99, "
                f"got {self.metric_percentiles!r}."
            )
        return tuple(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """The result as files and on standard output.

    Attributes:
        json: print the result as JSON too, as the last line.
        plot: write a PNG report to this file.
        disable_tqdm: no live display.
        save_result: save the result as a JSON file.
        save_detailed: save every request's times, text and error too.
        append_result: append the result as a line to an existing file.
        result_dir: folder of the saved result.
        result_filename: file of the saved result; LABEL-RATEqps-MODEL-DATE.json by default.
        label: prefix of the result's file name; `backend` by default.
        metadata: KEY=VALUE to keep in the result.
    """

    json: bool = False
    plot: Path | None = None
    disable_tqdm: bool = False
    save_result: bool = False
    save_detailed: bool = False
    append_result: bool = False
    result_dir: Path = Path()
    result_filename: str | None = None
    label: str | None = None
    metadata: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raises: ConfigError."""
        check_types(self)
        parse_pairs("metadata", self.metadata)

    def prepare(self) -> None:
        """Create the result's folder. Raises: ConfigError if the result could not be saved after the run."""
        if not (self.save_result or self.append_result):
            return
        try:
            self.result_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"`result_dir` {self.result_dir}: {error.strerror or error}.") from error
        if not os.access(self.result_dir, os.W_OK):
            raise ConfigError(f"`result_dir` {self.result_dir} cannot be written to.")

    def write(self, run: Run, settings: Mapping[str, object], report: ReportConfig) -> Metrics:
        """Print and save the result. Raises: ConfigError when a file cannot be written.

        Args:
            settings: of the run; ``label`` is the default.
        """
        metrics = compute_metrics(
            run.records,
            duration_s=run.duration_s,
            num_requests=run.num_requests,
            objectives_s=report.objectives_s(),
            percentiles=report.percentiles(),
        )
        label = {} if self.label is None else {"label": self.label}
        settings = {**settings, **label, **parse_pairs("metadata", self.metadata)}
        print(format_report(metrics, report.shown_figures(), settings))
        if run.is_interrupted:
            print("Interrupted: these are partial results.")
        if self.save_result or self.append_result:
            self._save(result_json(metrics, run, settings, is_detailed=self.save_detailed))
        if self.plot is not None:
            from backfill.bench.plot import save_plot

            save_plot(self.plot, run.records, f"{settings['model_id']}, {len(run.records)} requests")
        if self.json:
            print(json_line(result_json(metrics, run, settings)))
        return metrics

    def _save(self, result: Mapping[str, object]) -> None:
        model = str(result["model_id"]).rsplit("/", maxsplit=1)[-1]
        default = f"{result['label']}-{result['request_rate']}qps-{model}-{result['date']}.json"
        path = self.result_dir / (self.result_filename or default)
        try:
            with path.open("a" if self.append_result else "w", encoding="utf-8") as file:
                file.write(json_line(result) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error
        print(f"backfill: result saved to {path}", file=sys.stderr)
