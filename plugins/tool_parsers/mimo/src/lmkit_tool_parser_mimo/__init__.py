"""MiMo tool calls and reasoning for lmkit."""
