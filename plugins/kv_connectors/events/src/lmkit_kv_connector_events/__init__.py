"""Which blocks the cache has, published for routers."""
