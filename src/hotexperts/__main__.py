"""`python -m hotexperts` is the `hotexperts` command, which begins here as well."""

import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command line; Ctrl-C while it is imported ends it as quietly as later.

    Returns:
        The exit status.
    """
    try:
        from hotexperts.cli.main import main as command
    except KeyboardInterrupt:
        return _INTERRUPTED
    return command()


if __name__ == "__main__":
    sys.exit(main())
