"""Executes step plans: builds the batch, runs the model over it, samples."""
