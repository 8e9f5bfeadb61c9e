"""BlendServe's evaluation, and what follows from it for pools beside online traffic."""
