"""``python -m backfill``, the same as the ``backfill`` command."""


def main() -> None:
    # Imports come after the handler: Ctrl-C may come while they take their time.
    import signal
    import sys

    from backfill.cli.interrupts import exit_at_once, exit_silently
    from backfill.cli.standard_streams import open_standard_streams

    open_standard_streams()

    signal.signal(signal.SIGINT, exit_at_once)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    if sys.argv[1:2] == ["serve"] and not any(each.startswith(("-h", "--help")) for each in sys.argv):
        from backfill.engine.interpreter import start_interpreter

        start_interpreter()
    from backfill.cli.main import main as run_command_line

    try:
        run_command_line()
    finally:
        signal.signal(signal.SIGINT, exit_silently)


if __name__ == "__main__":
    main()
