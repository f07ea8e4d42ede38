import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from manualpar import gather_array_with_mean_grads, gather_examples, make_mesh
from manualpar.core.mesh.axes import axes_size, axis_tuple
from manualpar.core.parameters.collectives import (
    EXACT,
    MixedPrecisionPolicy,
    cast_to_varying,
    gather_invariant,
    is_vma_checked,
    scatter_mean,
    varying_axes,
)

AXIS_NAMES = ("data", ("data", "model"), ("model", "data"))
BOTH = ("data", "model")
# The axes, and whether types are checked.
GATHERED = [*((axes, True) for axes in AXIS_NAMES), (BOTH, False)]
AXIS_BY_AXIS = MixedPrecisionPolicy(axis_by_axis=True)


def skip_unless_mesh_has(mesh, axis_name):
    if not set(axis_tuple(axis_name)) <= set(mesh.axis_names):
        pytest.skip("the mesh has no such axis")


def index_coded(shape):
    return jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)


@pytest.mark.parametrize(("axis_name", "check_vma"), GATHERED, ids=str)
def test_gathers_every_element_into_its_place(mesh8, axis_name, check_vma):
    skip_unless_mesh_has(mesh8, axis_name)
    x = index_coded((8, 16, 8))
    dims = {0: P(axis_name), -1: P(None, None, axis_name)}

    def on_device(shards):
        return {
            dim: gather_array_with_mean_grads(shard, dim, axis_name)[None]
            for dim, shard in shards.items()
        }

    run = jax.shard_map(
        on_device,
        mesh=mesh8,
        in_specs=(dims,),
        out_specs=P(tuple(mesh8.axis_names)),
        check_vma=check_vma,
    )
    for copies in jax.jit(run)(dict.fromkeys(dims, x)).values():
        np.testing.assert_array_equal(copies, np.broadcast_to(x, (8, 8, 16, 8)))


@pytest.mark.parametrize(("axis_name", "check_vma"), GATHERED, ids=str)
def test_gradient_is_the_mean_over_the_gathered_axes(mesh8, axis_name, check_vma):
    skip_unless_mesh_has(mesh8, axis_name)
    axes = axis_tuple(axis_name)
    n = axes_size(mesh8, axes)
    x = index_coded((8, 16))
    weights = jax.random.normal(jax.random.key(0), (n, 8, 16))  # Each device's own linear loss.
    dims = {0: P(axis_name), 1: P(None, axis_name)}

    def on_device(shards, weight):
        def loss(shards):
            return sum(
                jnp.sum(gather_array_with_mean_grads(shard, dim, axis_name) * weight[0])
                for dim, shard in shards.items()
            )

        return jax.grad(loss)(shards)

    run = jax.shard_map(
        on_device, mesh=mesh8, in_specs=(dims, P(axes)), out_specs=dims, check_vma=check_vma
    )
    for grad in jax.jit(run)(dict.fromkeys(dims, x), weights).values():
        np.testing.assert_allclose(grad, weights.mean(0), rtol=1e-6)


@pytest.mark.parametrize("comm", [EXACT, AXIS_BY_AXIS], ids=["at once", "axis by axis"])
@pytest.mark.parametrize("axis_name", [("data", "model"), ("model", "data")], ids=str)
def test_either_way_every_element_lands_where_a_spec_says(mesh8, axis_name, comm):
    skip_unless_mesh_has(mesh8, axis_name)
    n = axes_size(mesh8, axis_name)
    x = index_coded((3, 16))
    weights = index_coded((n, 3, 16)) ** 2  # Each device's own linear loss.

    def on_device(shard, weight):
        def loss(shard):
            whole = gather_array_with_mean_grads(shard, 1, axis_name, comm=comm)
            return jnp.sum(whole * weight[0]), whole

        grad, whole = jax.grad(loss, has_aux=True)(shard)
        scattered = scatter_mean(weight[0], 1, axis_name, comm=comm)
        return whole[None], gather_invariant(shard, 1, axis_name, comm=comm), grad, scattered

    sharded = P(None, axis_name)
    run = jax.shard_map(
        on_device,
        mesh=mesh8,
        in_specs=(sharded, P(axis_name)),
        out_specs=(P(axis_name), P(), sharded, sharded),
        check_vma=True,
    )
    copies, whole, grad, scattered = jax.jit(run)(x, weights)
    np.testing.assert_array_equal(copies, np.broadcast_to(x, (n, 3, 16)))
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_allclose(grad, weights.mean(0), rtol=1e-6)
    np.testing.assert_allclose(scattered, weights.mean(0), rtol=1e-6)
    text = jax.jit(run).lower(x, weights).as_text()
    sizes = [mesh8.shape[axis] for axis in axis_name] if comm.axis_by_axis else [n]
    sending = sum(size > 1 for size in sizes)  # Types alone are told that one device is invariant.
    assert text.count('"stablehlo.all_gather"') == sending + len(sizes)
    assert text.count('"stablehlo.reduce_scatter"') == 2 * sending


def test_one_gather_forward_and_one_scatter_backward(devices8):
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices8)

    def loss(shard):
        return jnp.sum(gather_array_with_mean_grads(shard, 0, "data") ** 2)

    run = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    text = jax.jit(run).lower(jnp.ones((16, 4))).as_text()
    assert text.count('"stablehlo.all_gather"') == 1
    assert text.count('"stablehlo.reduce_scatter"') == 1
    assert text.count('"stablehlo.all_reduce"') == 0


def test_types_tell_what_varies(devices8):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)

    def on_device(check_vma, x, y):
        assert is_vma_checked("data") is check_vma
        assert varying_axes(x) == ({"data"} if check_vma else set())
        assert varying_axes(y) == set()
        both = cast_to_varying({"x": x, "y": y}, ("data", "model"))
        for leaf in both.values():
            assert varying_axes(leaf) == ({"data", "model"} if check_vma else set())
        return x

    for check_vma in (True, False):
        run = jax.shard_map(
            lambda x, y, check_vma=check_vma: on_device(check_vma, x, y),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            check_vma=check_vma,
        )
        jax.eval_shape(run, jnp.ones(8), jnp.ones(8))
    assert varying_axes(jnp.ones(8)) == set()


def test_erf_is_differentiated_where_types_are_checked(devices8):
    """Exact GELU has it; JAX 0.12 alone refuses the constants of its derivative."""
    x = jnp.linspace(-3.0, 3.0, 16)
    grad = jax.grad(lambda x: jax.scipy.special.erf(x).sum())
    run = jax.shard_map(grad, mesh=make_mesh({"data": 8}), in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(run)(x), 2 / np.sqrt(np.pi) * np.exp(-(x**2)), rtol=1e-5)


def test_gradient_of_a_shard_that_some_of_the_axes_hold_in_common(devices8):
    # By its type it varies over `data` alone: it is cast, and the cast sums its gradient back.
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    axes = ("data", "model")
    weights = jax.random.normal(jax.random.key(0), (8, 16))

    def on_device(shard, weight):
        def loss(shard):
            return jnp.sum(gather_array_with_mean_grads(shard, 0, axes) * weight[0])

        return jax.grad(loss)(shard)

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(P("data"), P(axes)), out_specs=P("data"))
    expected = weights.mean(0).reshape(4, 2, 2).sum(1).ravel()
    np.testing.assert_allclose(jax.jit(run)(jnp.arange(8.0), weights), expected, rtol=1e-5)


def test_examples_are_gathered_in_the_order_of_the_batch(mesh8):
    names = tuple(mesh8.axis_names)
    tree = {
        "float": index_coded((16, 2)),
        "int": jnp.arange(16, dtype=jnp.int8),
        "bool": jnp.arange(16) % 3 == 0,
        "key": jax.random.split(jax.random.key(0), 16),
    }

    def on_device(tree):
        local = {**tree, "constant": jnp.ones(16 // 8)}  # Which varies over no axis by its type.
        gathered = gather_examples(local)
        assert gathered["constant"].shape == (16,)
        gathered = {name: gathered[name] for name in tree}
        return gathered, gather_examples(tree, names[::-1])

    everywhere = jax.tree.map(lambda _: P(names), tree)
    run = jax.shard_map(
        on_device, mesh=mesh8, in_specs=P(names), out_specs=(everywhere, everywhere)
    )
    gathered, backwards, tree = map(to_numpy, (*jax.jit(run)(tree), tree))
    for name, x in tree.items():
        copies = gathered[name].reshape(8, *x.shape)
        np.testing.assert_array_equal(copies, np.broadcast_to(x, copies.shape))
        parts = x.reshape(*mesh8.axis_sizes, 2, *x.shape[1:])
        dims = len(mesh8.axis_sizes)
        reverse = parts.transpose(*reversed(range(dims)), *range(dims, parts.ndim))
        np.testing.assert_array_equal(backwards[name][:16], reverse.reshape(x.shape))


def to_numpy(tree):
    return {
        name: np.asarray(jax.random.key_data(x) if name == "key" else x) for name, x in tree.items()
    }


def test_examples_are_gathered_once_over_the_axes_that_they_vary_over(devices8):
    mesh = make_mesh({"data": 4, "model": 2}, devices8)
    run = jax.shard_map(gather_examples, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    jaxpr = str(jax.make_jaxpr(run)(jnp.arange(8.0)))
    assert jaxpr.count("= all_gather[") == 1
    assert "axis_name=('data',)" in jaxpr


def test_examples_on_one_device_are_all_there():
    x = jnp.arange(4.0)
    assert gather_examples(x) is x
    assert gather_examples({"x": x}, "data")["x"] is x
