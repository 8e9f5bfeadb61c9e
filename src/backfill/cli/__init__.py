"""The ``backfill`` command: one file a subcommand."""
