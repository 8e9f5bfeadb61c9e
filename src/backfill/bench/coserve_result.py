"""The result of ``bench coserve``: figures of each policy, beside those of earlier results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backfill.bench.coserve import CoserveRun
from backfill.bench.coserve_figures import (
    CoserveFigures,
    Timeline,
    figures_of,
    median_figures,
    policy_json,
    timeline_of,
)
from backfill.bench.coserve_load import CoserveLoad
from backfill.core.errors import ConfigError


@dataclass(slots=True)
class CoserveResult:
    """What was measured so far, by policy.

    Attributes:
        model: its name at the server.
        earlier: entries of ``policies`` in earlier results.
        rounds: figures of each round.
        timelines: of each policy's first round, and of earlier results.
    """

    load: CoserveLoad
    model: str
    earlier: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    rounds: dict[str, list[CoserveFigures]] = field(default_factory=dict)
    timelines: dict[str, Timeline] = field(default_factory=dict)

    def add(self, name: str, run: CoserveRun) -> CoserveFigures:
        """Add one round of a policy. Returns its figures."""
        figures = figures_of(run)
        self.model = run.model
        self.rounds.setdefault(name, []).append(figures)
        if len(self.rounds[name]) == 1:
            self.timelines[name] = timeline_of(run)
        return figures

    def add_earlier(self, path: Path) -> list[str]:
        """Add an earlier result. Returns the settings of the load that differ from ours.

        Raises: ConfigError for a file that is no result of this command.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["scenario"] != "coserve":
                raise KeyError("scenario")
            timelines = {name: Timeline(**each) for name, each in content.get("timelines", {}).items()}
            ours, theirs = self.load.as_json(), content["load"]
            differing = [key for key in ours if theirs.get(key) != ours[key] and key != "offline_mode"]
            self.earlier |= content["policies"]
            self.timelines |= timelines
        except OSError as error:
            raise ConfigError(f"`compare` {path} cannot be read: {error.strerror or error}.") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"`compare` {path} is no result of bench coserve --result.") from error
        return differing

    def as_json(self) -> dict[str, Any]:
        """The result without timelines."""
        known = {each.name for each in dataclasses.fields(CoserveFigures)}
        baselines = {
            name: CoserveFigures(**{key: value for key, value in entry.items() if key in known})
            for name, entry in self.earlier.items()
        }
        baselines |= {name: median_figures(rounds) for name, rounds in self.rounds.items()}
        policies = {name: policy_json(rounds, baselines) for name, rounds in self.rounds.items()}
        for name, entry in self.earlier.items():
            # Its figures stay; its ratios are to the baselines of this result.
            ratios = policy_json([baselines[name]], baselines)
            changed = {key: ratios[key] for key in ratios.keys() - known}
            policies.setdefault(name, {**entry, **changed})
        return {
            "scenario": "coserve",
            "model": self.model,
            "slo": {"ttft_s": self.load.ttft_slo, "tpot_s": self.load.tpot_slo},
            "load": self.load.as_json(),
            "policies": policies,
        }

    def save(self, result: Path | None, plot: Path | None) -> None:
        """Write the result with its timelines, and the plot.

        Raises: ConfigError when a file cannot be written.
        """
        timelines = {name: dataclasses.asdict(each) for name, each in self.timelines.items()}
        try:
            if result is not None:
                result.write_text(
                    json.dumps({**self.as_json(), "timelines": timelines}) + "\n", encoding="utf-8"
                )
        except OSError as error:
            raise ConfigError(f"{result} cannot be written: {error.strerror or error}.") from error
        if plot is not None and timelines:
            from backfill.bench.coserve_plot import save_plot

            save_plot(plot, self.timelines, self.load, self.title)

    @property
    def title(self) -> str:
        load = self.load
        offline = {"batch": "a batch", "none": "no offline load"}.get(
            load.offline_mode, f"{load.offline_concurrency} offline at once"
        )
        return (
            f"{self.model}: {load.rate:g} online requests/s of {load.lengths('input_len')} in, "
            f"{load.lengths('output_len')} out, beside {offline}; {load.duration:g} s"
        )
