"""Tool calls and reasoning of families with one format each for lmkit."""
