"""What is done to a lease that it does not allow: twice, too late, to the wrong pool."""
