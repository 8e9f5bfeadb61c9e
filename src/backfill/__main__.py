"""``python -m backfill``, the same as the ``backfill`` command."""


def main() -> None:
    # Here and not above: the engine's process begins with this module and needs no command line.
    from backfill.cli.main import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
