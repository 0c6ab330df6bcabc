"""The driver of this example: `reef run recipes/tttd -- --help`."""

import sys

from reef.core.load import load

if __name__ == "__main__":
    sys.exit(load("recipes.tttd.drive:main")())
