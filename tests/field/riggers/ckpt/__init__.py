"""Asynchronous sharded checkpoints: staging arena, shard writers and the manager of generations."""
