"""NNX models as an adapter: they are called as Linen models are."""
