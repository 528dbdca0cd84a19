from .schedule import run_1f1b, run_eval  # noqa: F401
