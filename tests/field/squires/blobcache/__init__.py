"""Local cache of remote blobs (datasets, tokenizer files, adapters) in extents of one big file."""
from .cache import BlobCache, FetchError
from .extents import ExtentMap, VolumeFull
from .reader import BadBlob, BlobReader, concat, copy_blob
from .sweeper import Sweeper, WarmSet

__all__ = [
    "BadBlob", "BlobCache", "BlobReader", "ExtentMap", "FetchError", "Sweeper", "VolumeFull", "WarmSet", "concat",
    "copy_blob",
]
