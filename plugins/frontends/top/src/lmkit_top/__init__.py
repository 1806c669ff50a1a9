"""`lmkit top`: a running server, watched from a terminal by its /metrics."""
