"""Harness trees: what surrounds the model, as a flat list of entries `{id, kind, config}`.

Knows: how a tree is read, written, limited, and how its rules are put into a chat request (`tree.py`).
Does not know: how an edit is checked (`cordis`), who proposed it, or whether it is served.
"""
