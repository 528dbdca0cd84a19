"""Router in front of several replicas: load tickets, connections and sticky sessions."""
