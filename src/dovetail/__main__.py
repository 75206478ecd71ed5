"""`python -m dovetail` is `dovetail`."""

from dovetail.cli import main

main()
