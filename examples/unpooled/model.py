"""A model of the others' modules, which makes nothing large itself."""

from torch import nn

from .biased import BiasedAttention
from .chunked import ChunkedAttention
from .pooling import SegmentSummary, SummaryBlock


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = BiasedAttention(dim, heads, dropout=0.0)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    """Layers, a summary, and a reader for inference.

    Parameters
    ----------
    dim : int
        Width of the model.
    depth : int
        Number of layers.
    """

    def __init__(self, dim, depth, heads=4):
        super().__init__()
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.summary = SegmentSummary(dim)
        self.tail = SummaryBlock(nn.Linear(dim, dim), nn.GELU())
        self.reader = self.build_reader(dim, heads)

    def build_reader(self, dim, heads):
        return ChunkedAttention(dim, heads, block=32)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.tail(self.summary(x)), self.reader(x)

    def close(self):
        """Forget the reader."""
        self.reader = None
