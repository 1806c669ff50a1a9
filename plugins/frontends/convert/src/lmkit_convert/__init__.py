"""Pickled checkpoints as safetensors."""
