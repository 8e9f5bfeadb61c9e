"""Which request computes what in the next step. Pure policy: no torch, no I/O, no system clock."""
