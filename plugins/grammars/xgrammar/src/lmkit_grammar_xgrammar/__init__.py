"""Constrained output by xgrammar."""
