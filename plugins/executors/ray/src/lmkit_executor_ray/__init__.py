"""Ranks as actors of a Ray cluster."""
