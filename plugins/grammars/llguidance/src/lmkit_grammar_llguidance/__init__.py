"""Constrained output by llguidance."""
