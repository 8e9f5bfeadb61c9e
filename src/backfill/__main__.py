"""``python -m backfill``, the same as the ``backfill`` command."""

from backfill.cli.main import main

if __name__ == "__main__":
    main()
