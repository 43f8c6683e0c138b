"""`python -m hybrid_ep`: the `hybrid-ep` command where no console script is installed."""

import sys

from hybrid_ep.cli import main

sys.exit(main())
