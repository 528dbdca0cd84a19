"""Reward model service: permits for the scorer's GPU, request objects, batcher."""
