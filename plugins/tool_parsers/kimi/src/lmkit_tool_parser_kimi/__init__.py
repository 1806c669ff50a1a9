"""Kimi tool calls and reasoning for lmkit."""
