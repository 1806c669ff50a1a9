"""Olmo tool calls and reasoning for lmkit."""
