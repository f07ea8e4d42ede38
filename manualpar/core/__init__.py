"""The core: programs and their steps. Each package imports only packages before it in this list.

`tracing` defines named scopes and reads jaxprs. `mesh` defines meshes and the roles of their axes.
`parameters` defines how parameters are sharded and gathered. `state` defines the train state.
`modes` decides who writes the collectives (this package, XLA, or JAX's types), and accumulates and
reduces gradients. `model` traces a user's model and loss. `program` puts a step together. What
reads or wraps a program, such as its checks, is in packages after this one.
"""
