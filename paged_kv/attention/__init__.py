"""Attention over pages: backends, masks, and how a model comes to use them."""
