"""Serving proxy: admission, replica leases and a micro-batcher in front of model replicas."""
