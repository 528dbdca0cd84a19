"""Collects trajectories for reinforcement learning of language models."""
