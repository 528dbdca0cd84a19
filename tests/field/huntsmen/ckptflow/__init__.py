"""Checkpoints of sharded training: staged in host memory, uploaded in parts, kept or deleted later."""
