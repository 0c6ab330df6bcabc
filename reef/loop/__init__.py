"""Learning: from new events to a served release, one learner task for each scenario.

Knows: the order of an update, what is durable after each line of it, and how a crash between any two is repaired.
Does not know: HTTP, losses, models, guards; it reaches them through the seams it is handed.

Begin with `update.py`. `line.py` finds the working copy of a part, `ledger.py` remembers what was used and decided,
`recover.py` repairs the ledger after a crash, `learner.py` runs it all and says what it is doing. Beside that,
`watch.py` takes back a release that users are less content with (`compare.py` has the test), `gain.py` measures it
again, `failures.py` makes tasks of what went wrong; `tell.py` writes the journal, and `hook.py` sends it on.
"""
