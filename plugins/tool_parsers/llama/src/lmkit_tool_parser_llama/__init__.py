"""Llama tool calls for lmkit."""
