"""Chat templates out of GGUF files."""
