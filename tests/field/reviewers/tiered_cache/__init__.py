"""Device and host KV pages with a controller which moves pages between them."""
