from .models import ModelCache
from .replicas import ReplicaSet
from .router import Router
