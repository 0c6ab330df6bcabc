"""From the event log to units: what a recipe can learn from, each with the reason when it cannot.

Knows: how reports and records join, which report on an answer counts, when a sample is trainable, how old it is.
Does not know: recipes, batches, trainers, or what was trained already (whoever settles units answers that).

`units.py` joins one report with one record, `pool.py` does so along the log, `lag.py` measures staleness on the chain,
`holdout.py` says which prompts never train.
"""
