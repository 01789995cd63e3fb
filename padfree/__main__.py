"""`python -m padfree` is the command `padfree`."""

from padfree.cli import main

raise SystemExit(main())
