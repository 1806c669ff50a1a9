"""`python -m lmkit` is `lmkit`."""

from lmkit.cli import main

main()
