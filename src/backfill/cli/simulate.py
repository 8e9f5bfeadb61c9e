"""``backfill simulate``: an operator's questions about traffic, in simulated time."""

from __future__ import annotations

from cyclopts import App

from backfill.cli.studies import command_of
from backfill.simulation.fleet_study import FleetStudy
from backfill.simulation.goodput import Goodput
from backfill.simulation.trace_study import TraceStudy

run = command_of(TraceStudy, "BACKFILL_")
fleet = command_of(FleetStudy, "BACKFILL_SIMULATE_")
goodput = command_of(Goodput, "BACKFILL_SIMULATE_")

app = App(name="simulate", help="Run the serving code in simulated time.")
app.command(f"{__name__}:run", name="run", help="Run your own traffic in simulated time.")
app.command(f"{__name__}:fleet", name="fleet", help="Compare routers of a fleet of replicas.")
app.command(f"{__name__}:goodput", name="goodput", help="Sweep goodput against load.")
