"""lmkit run-batch: batch files without a server."""
