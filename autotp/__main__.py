"""``python -m autotp``: the command line."""

from autotp.cli import main

main()
