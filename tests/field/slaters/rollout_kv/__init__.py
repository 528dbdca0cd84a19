"""KV-cache management of the rollout engine."""
