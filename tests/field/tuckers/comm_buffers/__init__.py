from .registry import BucketRegistry
from .reducer import Reducer, TracedReducer
