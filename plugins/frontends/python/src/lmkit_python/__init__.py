"""The Python API: `LLM` in this process, `AsyncLLM` with an engine in its own, `LLMEngine` step by step."""
