"""Makes the demo checkpoint: the data it learns from, its tokenizer, its training and its evaluation."""
