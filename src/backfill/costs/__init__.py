"""What a step takes: its load, a fitted model of the time, and the profile that carries the fit."""
