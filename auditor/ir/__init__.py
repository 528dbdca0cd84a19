"""Small operations and the flow graph that a function is lowered to."""
