"""MiniMax tool calls and reasoning for lmkit."""
