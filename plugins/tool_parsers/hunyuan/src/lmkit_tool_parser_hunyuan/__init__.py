"""Hunyuan tool calls and reasoning for lmkit."""
