"""The command line: `hotexperts run`, `hotexperts verify` and `hotexperts simulate`."""
