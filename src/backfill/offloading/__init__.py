"""Which layers' weights are outside device memory, and what that costs: Select-N's decisions, without I/O."""
