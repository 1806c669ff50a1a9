"""`python -m lmkit` is `lmkit`."""

from lmkit.command import main

main()
