"""Background engine that fuses and runs collective requests."""
