"""`python -m hotexperts` is the `hotexperts` command."""

import sys

from hotexperts.cli.main import main

sys.exit(main())
