"""Cordis is the harness's training backend: a batch's proposal becomes a candidate tree, whole or not at all.

After the idea of cordiverse/cordis (MIT) and its paper "A Programming Paradigm for Spatiotemporal Composability";
written fresh. Effects with inverses (`context`), entries that come and go with their needs (`composition`), a target of
placements (`target`), and, beyond Cordis, a tree that changes whole or not at all (`live`).

Knows: how mutations compose onto a tree (`compose`), what an edit must not contain (`screen`), what a person must agree
to (`hold`), what says nothing new (`novel`), and how untrusted text is shown to a proposer (`fence`).
Does not know: who proposed the edit, or whether it is any good. It does not decide; the gate does.
"""
