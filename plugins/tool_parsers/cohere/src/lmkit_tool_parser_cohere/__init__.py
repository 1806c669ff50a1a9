"""Cohere Command tool calls and reasoning for lmkit."""
