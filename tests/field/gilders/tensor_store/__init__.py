from .arena import Arena, StoredTensor
from .client import StoreClient, TensorRef
from .stage import FeatureStage

__all__ = ["Arena", "StoredTensor", "StoreClient", "TensorRef", "FeatureStage"]
