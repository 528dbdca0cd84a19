from .gateway import InferenceGateway
from .replicas import ReplicaSet

__all__ = ["InferenceGateway", "ReplicaSet"]
