"""Text to tokens and back: templates, tokenizers, stop strings, stream parsing. No torch, no transformers."""
