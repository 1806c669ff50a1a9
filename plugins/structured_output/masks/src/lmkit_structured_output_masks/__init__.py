"""Constrained output by masks: what may follow is a bit for each token of the vocabulary."""
