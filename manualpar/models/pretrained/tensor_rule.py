"""The form of the tables of tensors, see `manualpar.models.pretrained.tensor_names`."""

from typing import NamedTuple


class Rule(NamedTuple):
    """The tensor of a parameter in the files.

    Attributes:
      tensor: The name of the tensor. `{E}` in the name stands for an index along dim `E`: the
        parameter then stacks one tensor for each index.
      dims: The dims of the parameter, an arrow, and the dims of the tensor, such as
        `D N H -> (N H) D`, without stacked dims; `""` if both are the same.
      part: If the tensor contains several parameters: a dim of the tensor, the entries of this dim
        before the parameter's own, and all entries of the dim. Both numbers are sums: `"NK"` is
        `N + K`, and `"2"` is 2. The dim is one of the parameter's dims, or a new one along which
        the parameter has one entry.
    """

    tensor: str
    dims: str = ""
    part: tuple[str, str, str] | tuple[()] = ()
