"""Reef: an inference server that learns.

Importing this package loads nothing heavy: no torch, no server, no store. The rooms are listed in the README, from
`reef.core` (nouns) up to `reef.cli` (commands); imports go down that list only.
"""

__version__ = "0.1.0"
