from .writer import CheckpointWriter

__all__ = ["CheckpointWriter"]
