"""Any Hugging Face causal LM: loading, packed attention, packing, and weights on their way."""
