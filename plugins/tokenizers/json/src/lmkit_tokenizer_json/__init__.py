"""tokenizer.json and Jinja chat templates, both run in a process apart. No torch, no transformers."""
