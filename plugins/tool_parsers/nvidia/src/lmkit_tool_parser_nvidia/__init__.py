"""Nemotron reasoning for lmkit."""
