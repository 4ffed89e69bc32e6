"""`python -m services.cli` is `festina`."""

from services.cli.main import main

main()
