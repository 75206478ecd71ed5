"""`python -m dovetail` is `dovetail`."""

from dovetail.base.safe_path import leave_working_directory

leave_working_directory()  # before any other import

from dovetail.cli import main  # noqa: E402

main()
