"""GLM tool calls and reasoning for lmkit."""
