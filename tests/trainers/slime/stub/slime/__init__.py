"""Slime's types that a rollout function meets, by their documented fields. A stub: nothing of slime is here."""
