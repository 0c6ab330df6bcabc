"""One named scenario: how it comes to be, and which release it serves now.

Knows: the chain (what was released), the board (what is served), and that the second must follow the first.
Does not know: requests, records, recipes, engines, or why a release was made.

- The chain's head is the truth; the board is its copy for gateways, flipped only to a head.
- A process killed between a publish and its flip leaves the board behind; `align` catches up, at every start.
- Everything here works while the learner is dead.
"""
