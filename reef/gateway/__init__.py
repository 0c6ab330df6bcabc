"""The HTTP doors: inference, feedback, scenarios, releases, records, status.

Knows: HTTP, the dialects' error forms, tokens and rights, and in which order a record is stored and an answer leaves.
Does not know: how an answer is made, what is learnt from a report, or anything of the loop beyond "wake up".

One request passes through `app` (routes), `auth`, `body`, `chat` (the exchange) and `reply`. `serve` runs the app.
"""
