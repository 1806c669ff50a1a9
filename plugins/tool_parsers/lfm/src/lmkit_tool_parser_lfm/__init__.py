"""LFM tool calls for lmkit."""
