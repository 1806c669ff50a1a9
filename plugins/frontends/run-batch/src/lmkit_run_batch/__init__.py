"""Batch files of the OpenAI API: requests are read, answered and written, in a server or without one."""
