"""Qwen tool calls and reasoning for lmkit."""
