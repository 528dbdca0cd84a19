"""Node rotation for the training cluster's on-call."""
