"""KV cache tiers: device, host and disk."""
