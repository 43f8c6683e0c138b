"""`python -m hybrid_ep.cli`: the `hybrid-ep` command where no console script is installed."""

import sys

from hybrid_ep.cli import main

sys.exit(main())
