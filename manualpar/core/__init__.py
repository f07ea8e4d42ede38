"""What a program is and does. A room imports those before it in this list.

`tracing` names and reads what JAX traces. `mesh` has axes and their roles. `parameters` has where
parameters are stored and how they are gathered. `state` is the train state. `modes` decides who
writes the collectives, and how gradients are accumulated and reduced. `model` traces a user's model
and loss. `checks` refuses what could be wrong in silence. `program` puts a step together.
"""
