"""`python -m dovetail.cli` is `dovetail`."""

from dovetail.cli import main

main()
