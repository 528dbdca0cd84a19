"""KV swap between device and host block spaces for preempted sequence groups."""
