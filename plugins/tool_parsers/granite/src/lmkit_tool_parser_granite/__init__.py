"""Granite tool calls and reasoning for lmkit."""
