"""The core: programs and their steps. Each room imports only rooms before it in this list.

`tracing` names and reads traced operations. `mesh` has axes and their roles. `parameters` says
where parameters are stored and how they are gathered. `state` is the train state. `modes` decides
who writes the collectives, and how gradients are accumulated and reduced. `model` traces a user's
model and loss. `checks` refuses programs that could be wrong in silence. `program` puts a step
together.
"""
