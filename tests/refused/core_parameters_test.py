"""Mistakes in annotations and rules of parameters, and in collectives over parameters."""

import functools
import operator
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import abstract_mesh, fsdp, gather_examples, gather_params, hsdp, shard_params, zero
from manualpar.core.parameters.annotations import check_rules, mesh_names
from manualpar.core.parameters.collectives import gather_array_with_mean_grads
from manualpar.core.parameters.placement import describe_parameters
from manualpar.core.parameters.sharded_parameter import ShardedParameter
from tests.refused.table import build, check_refused, rows, trace_on

FOUR_BY_TWO = abstract_mesh({"data": 4, "model": 2}, 8)
DATA8 = abstract_mesh({"data": 8}, 8)
RULES = (("embed", None), ("mlp", "model"), ("heads", ("data", "model")), ("batch", "data"))
WHERE = r"^model: parameter 'mlp/kernel' of shape \(18, 64\) is annotated with names "
VALUE = jax.ShapeDtypeStruct((18, 64), jnp.float32)


def resolve(case, box=nn.Partitioned):
    """Resolves the names of a kernel's dims; `case` is the names, then the dims of loops."""
    names, *loop_dims = case
    options = {"loop_dims": frozenset(loop_dims), "mesh": FOUR_BY_TWO, "rules": RULES}
    return mesh_names("mlp/kernel", box(VALUE, names), VALUE.shape, **options)


def described(case):
    names, *loop_dims = case
    box = {"p": nn.Partitioned(VALUE, names)}
    return describe_parameters(box, {"p": frozenset(loop_dims)}, FOUR_BY_TWO, ())


def on_data(function, check_vma=True):
    return trace_on(DATA8, function, P("data"), np.arange(8.0), check_vma=check_vma)


def unbound(function):
    return function({"p": np.ones(8, np.float32)}, "data")


def named_wrongly(function):
    return on_data(lambda x: function({"p": x}, "dat")["p"])


SAME = "x is the same on all devices by its type, .*axis_name=program.data_axes"
BUILDERS = ((fsdp, {"data": 8}), (zero, {"data": 8}), (hsdp, {"replica": 2, "data": 4}))

WRONG_RULES = (
    (None, TypeError, "fsdp: rules=None, expected pairs in a tuple like (('embed', None"),
    ({"mlp": "model"}, TypeError, "fsdp: rules={'mlp': 'model'}, expected pairs in a tuple"),
    ("mlp", TypeError, "fsdp: rules='mlp', expected pairs in a tuple"),
    (("mlp", "model"), TypeError, "fsdp: rules has 'mlp', expected a pair (logical name, axes)"),
    (("ab",), TypeError, "fsdp: rules has 'ab', expected a pair"),
    ((("mlp",),), TypeError, "fsdp: rules has ('mlp',), expected a pair"),
    ((("mlp", "data", "model"),), TypeError, "rules has ('mlp', 'data', 'model'), expected a"),
    (((1, "model"),), TypeError, "fsdp: rules has (1, 'model'), expected a pair"),
    (((None, "model"),), TypeError, "fsdp: rules has (None, 'model'), expected a pair"),
    (
        (("mlp", 1),),
        TypeError,
        "fsdp: rules has ('mlp', 1), expected a pair (logical name, axes), where axes is a mesh"
        " axis, a tuple of mesh axes, or None. Write rules like (('embed', None), ('mlp', 'model"
        "')).",
    ),
    ((("mlp", ("data", 1)),), TypeError, "rules has ('mlp', ('data', 1)), expected a pair"),
    (
        (("embed", None), ("mlp", "modle")),
        ValueError,
        "fsdp: rules has ('mlp', 'modle'), which names ['modle'], but the mesh has the "
        "axes ['data', 'model']; the nearest one is 'model'. Name one of these, write "
        "('mlp', None), or build the mesh with the axis.",
    ),
    (
        (("mlp", ("data", "qqq")),),
        ValueError,
        "which names ['qqq'], but the mesh has the axes ['data', 'model']. Name one of these",
    ),
    (
        (("mlp", ("data", "data")),),
        ValueError,
        "fsdp: rules has ('mlp', ('data', 'data')), which names an axis twice; name each once.",
    ),
)
WRONG_NAMES = (
    (
        ((None, "modle"),),
        r"\(None, 'modle'\), of which \['modle'\] are not axes of the mesh "
        r"\['data', 'model'\]; the nearest one is 'model'\. Name one of these or nothing, or build "
        r"the mesh with make_mesh\({'modle': 1, 'data': 4, 'model': 2}\): an axis of size 1 "
        r"shards nothing",
    ),
    (((None, ("data", "pipe")),), r".*, of which \['pipe'\] are not axes of the"),
    (
        (("mlp", None),),
        r".* \['mlp'\] are not axes of the mesh \['data', 'model'\]\. The rules have "
        r"\['mlp'\], but nn.with_partitioning does not use rules: annotate with "
        r"nn.with_logical_partitioning",
    ),
    ((("data", "data"),), ".*, which shards it over an axis twice; name each"),
    ((("data", None, None),), ".*, expected at most one name for each dimension"),
    (
        ((None, ("data", "model")), 1),
        r".*, but dim 1 cannot be sharded over \('data', 'model'\) of size 8: nn.scan "
        r"or nn.vmap runs over\. Name another dim\.",
    ),
    (
        (("data", None),),
        ".*, but dim 0 cannot be sharded over 'data' of size 4: does not divide by it. Name",
    ),
    (("data",), TypeError, "'data', expected a tuple with a name or None for each dimension"),
    ((None,), TypeError, "None, expected a tuple with a name or None for each dimension"),
    (((0, None),), TypeError, r"\(0, None\), expected a tuple with a name or None"),
)
WRONG_LOGICAL_NAMES = (
    (
        (("embed", "mpl"),),
        r"\('embed', 'mpl'\), of which \['mpl'\] are not in rules "
        r"\['embed', 'mlp', 'heads', 'batch'\]; the nearest one is 'mlp'\. Write rules=\(.*"
        r"\('batch', 'data'\), \('mpl', None\)\), which has all names of the model\. To shard "
        r"a dimension, replace its None by an axis of the mesh \['data', 'model'\]",
    ),
    ((("data", None),), r".*, of which \['data'\] are not in rules"),
    ((("layers", "embed"), 1), r".*, of which \['layers'\] are not in rules"),
    (
        (("embed", "embed"),),
        r".*, of which \['embed'\] stand for more than one dimension, so that rules "
        r"cannot distinguish the dimensions\. Give each dimension its own name, or None\.",
    ),
    ((("embed", "mlp", None),), ".*, expected at most one name for each dimensio"),
    (
        (("embed", "mlp"), 1),
        ".*, but dim 1 cannot be sharded over 'model' of size 2: nn.scan or nn.vmap "
        "runs over. Name another dim, or give 'mlp' another rule.",
    ),
    (
        (("batch", None),),
        ".*, but dim 0 cannot be sharded over 'data' of size 4: does not divide by "
        "it. Name another dim, or give 'batch' another rule.",
    ),
    (
        ((("embed", "mlp"), None),),
        TypeError,
        r".*, expected one logical name or None for each dimension\. Give the dimension one",
    ),
    ((("embed", P.UNCONSTRAINED),), TypeError, ".*, expected a tuple with a name or None"),
)

REFUSED = [
    *rows(
        "rules",
        lambda rules: check_rules("fsdp", rules, FOUR_BY_TWO),
        *((rules, error, re.escape(words)) for rules, error, words in WRONG_RULES),
    ),
    *rows("names", resolve, *((*case, WHERE + words) for *case, words in WRONG_NAMES)),
    *rows(
        "logical names",
        lambda case: resolve(case, nn.LogicallyPartitioned),
        *((*case, WHERE + words) for *case, words in WRONG_LOGICAL_NAMES),
    ),
    *rows(
        "rules in a box",
        lambda own: resolve([("a",)], functools.partial(nn.LogicallyPartitioned, rules=own)),
        ((("a", "modell"),), r"^model: parameter 'mlp/kernel': rules has \('a', 'modell'"),
    ),
    *rows(
        "annotations",
        described,
        ((("embed", None),), r"of which \['embed'\] are not axes of the mesh"),
        (((None, ("data", "pipe")),), r"of which \['pipe'\] are not axes of the mesh"),
        ((("data", "data"),), "over an axis twice"),
        ((("data", None, None),), "expected at most one name for each dimension"),
        (((None, ("data", "model")), 1), "nn.scan or nn.vmap runs over"),
        ((("data", None),), "dim 0 cannot be sharded over 'data' of size 4: does not divide"),
    ),
    *rows(
        "a loop over a sharded dim",
        lambda names: ShardedParameter(None, names, gather_axes=("data",)).remove_axis(0, {}),
        (("data", None), r"nn.scan or nn.vmap runs over dim 0.*sharded over 'data'"),
    ),
    *rows(
        "replicate",
        lambda case: build(builder=case[0], axes=case[1], replicate=case[2]),
        *(
            ((*case, ("input_dens",)), r"replicate names 'input_dens', .* such as 'input_dense'")
            for case in BUILDERS
        ),
        ((zero, None, "wte"), TypeError, r"zero: replicate='wte', expected a tuple of names"),
    ),
    *rows(
        "an axis that is not bound",
        unbound,
        (shard_params, r"shard_params: axis_name names \['data'\]"),
        (gather_params, r"gather_params: axis_name names \['data'\]"),
    ),
    *rows(
        "an axis of another name",
        named_wrongly,
        *((call, r"names \['dat'\].*binds \['data'\]") for call in (shard_params, gather_params)),
    ),
    *rows(
        "gather_array_with_mean_grads",
        operator.call,
        (
            lambda: gather_array_with_mean_grads(np.ones(8, np.float32), 0, "data"),
            r"gather_array_with_mean_grads: axis_name names \['data'\]",
        ),
        (
            lambda: on_data(lambda x: gather_array_with_mean_grads(x, 1, "data")),
            r"axis=1 is not a dimension of an array of shape \(1,\)",
        ),
    ),
    *rows(
        "gather_examples",
        operator.call,
        (
            lambda: gather_examples({"loss": np.ones(())}),
            r"gather_examples: x\['loss'\] has no dims",
        ),
        (lambda: on_data(lambda x: gather_examples(jnp.ones(1))), SAME),
        # Without `check_vma`, the types do not show that the values are equal on all devices.
        (lambda: on_data(gather_examples, check_vma=False), SAME),
        (
            lambda: on_data(lambda x: gather_examples(x, "dat")),
            r"gather_examples: axis_name names \['dat'\]",
        ),
    ),
]


@pytest.mark.usefixtures("devices8")
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused(call, error, words):
    check_refused(call, error, words)
