"""The worker side: rows, step inputs, the worker and the in-process executor."""
