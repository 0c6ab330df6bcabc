"""The embedded engine: a Llama-family model answered by this package's own torch code, in a process of its own.

Knows: a model folder, tokens, a KV cache in slots, LoRAs by release id.
Does not know: HTTP, scenarios, records, or where a release's files come from.

`client`, `folder`, `layout`, `convert` and `text` import no torch; the rest runs in the engine process.
"""
