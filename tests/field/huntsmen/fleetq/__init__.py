"""Workers of a fine-tuning fleet, fed by a queue whose messages come back unless they are acknowledged."""
