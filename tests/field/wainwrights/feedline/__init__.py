"""feedline: multimodal training data, from shards in object storage to device batches."""

from .loader import Loader, LoaderConfig
