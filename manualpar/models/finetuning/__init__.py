"""Training a little beside a model that is given: adapters of low rank, and a base in int8."""
