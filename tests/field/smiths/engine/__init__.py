"""Single-machine inference engine: block manager, requests, scheduler, step loop."""
