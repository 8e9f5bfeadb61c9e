"""The serving code on a virtual clock, and the experiments of the papers run on it."""
