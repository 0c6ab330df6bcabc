"""The nouns every room shares: records, reports, units, releases, ids, errors, and the messages between processes.

Knows: what the words mean and how they look on the wire between Reef's own processes.
Does not know: HTTP, SQLite, git, torch, or which recipe runs. Nothing here imports another room.
"""
