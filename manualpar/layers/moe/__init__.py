"""Mixtures of experts: routing, and the exchange of tokens between devices."""
