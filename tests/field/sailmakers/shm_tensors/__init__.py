"""Tensor hand-over between the API process and engine workers through one shared memory segment."""
from .segment import Segment, Chunk
from .publisher import Publisher
from .consumer import Consumer
