"""Mistral's tokenizers by mistral-common."""
