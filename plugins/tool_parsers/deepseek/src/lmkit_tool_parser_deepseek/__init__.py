"""DeepSeek tool calls and reasoning for lmkit."""
