"""Point to point traffic between pipeline stages."""
from .channel import Channel
from .stage import StageLink
from .tags import TagSpace
from .wire import WirePool

__all__ = ["Channel", "StageLink", "TagSpace", "WirePool"]
