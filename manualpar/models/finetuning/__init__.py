"""Fine-tuning of a given model: adapters of low rank, and a base stored in int8."""
