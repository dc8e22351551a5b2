"""Policies: model, tokenizer, tiny models from scratch and their warm-up."""
