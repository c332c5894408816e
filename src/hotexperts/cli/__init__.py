"""The command line: `hotexperts run` and `hotexperts verify`."""
