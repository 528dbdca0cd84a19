"""Agentic rollouts for reinforcement learning: engines generate, sandboxes run the tools, a buffer collects."""
