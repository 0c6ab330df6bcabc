"""`python -m reef` is the program `reef`."""

from reef.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
