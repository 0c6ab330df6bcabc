"""Cordis is the harness's training backend: a batch's proposal becomes a candidate tree, whole or not at all.

Knows: how mutations compose onto a tree (`compose.py`) and what an edit must not contain (`screen.py`).
Does not know: who proposed the edit, or whether it is any good. It does not decide; the gate does.
"""
