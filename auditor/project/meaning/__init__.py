"""What a call does to a lease: acquires it, releases it, takes it over, hands it back."""
