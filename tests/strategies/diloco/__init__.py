"""Replicas that train apart and seldom exchange what they have learned."""
