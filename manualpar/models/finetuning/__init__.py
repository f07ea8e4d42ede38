"""Fine-tunes a given model with adapters of low rank, and stores frozen parameters in int8."""
