from .schedule import one_f_one_b, gpipe, evaluate
from .stage import Stage
