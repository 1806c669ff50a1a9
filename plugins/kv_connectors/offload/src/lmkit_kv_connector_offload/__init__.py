"""Blocks that the cache gives up, in memory of the host and on its disk."""
