"""Durable offline work: files, batches, the lines of a batch, and feeding them to the engine."""
