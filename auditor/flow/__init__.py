"""One worklist solver and the ownership domain it runs."""
