"""StepFun tool calls and reasoning for lmkit."""
