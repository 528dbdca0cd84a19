from .actor import Actor, collect_demo
from .envs import EnvPool
from .learner import Learner, evaluate
from .store import Arena, Weights
