"""Mistral tool calls and reasoning for lmkit."""
