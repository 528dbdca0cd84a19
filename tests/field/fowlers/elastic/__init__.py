"""Elastic membership of a training job: registry, barriers, agents."""
