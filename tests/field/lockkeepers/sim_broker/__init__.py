"""Broker between rollout workers and external simulators: ports, licences, processes."""
