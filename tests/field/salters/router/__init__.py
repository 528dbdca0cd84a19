"""Router in front of the replicas: connections, hedged requests and retries."""
