"""One process per rank: the executor `multiproc`."""
