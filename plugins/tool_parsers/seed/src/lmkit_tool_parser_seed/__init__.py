"""Seed-OSS tool calls and reasoning for lmkit."""
