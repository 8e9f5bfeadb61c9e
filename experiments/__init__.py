"""Studies of papers, run on the simulator of the package; ``python -m experiments`` lists them."""
