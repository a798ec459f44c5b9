"""Parts of make_sample_checkpoint.py: training text, tokenizer, weights, and the chat template's source."""
