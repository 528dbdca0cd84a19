"""Experiment tracking server core."""
from .runs import RunService

__all__ = ["RunService"]
