"""Gemma tool calls and reasoning for lmkit."""
