from .staging import StagingArea, StagingBlock
from .writer import CheckpointWriter
from .restore import Restorer

__all__ = ["StagingArea", "StagingBlock", "CheckpointWriter", "Restorer"]
