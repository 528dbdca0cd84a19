"""Feeds tokenised shards to the ranks of a training run."""
