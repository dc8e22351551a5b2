"""Policies: model, tokenizer, attention, packing, tiny models from scratch."""
