"""Makes the model, the batches and the loss of a program of `random_programs`.

`make_model` returns the model of a program, with the wrappers in its description: a tensor-parallel
plan, int8 base weights, and LoRA. It also returns a `Plain`: the same model without wrappers, and a
function that converts the program's parameters to the parameters of this model. `Plain` uses no
code of the package except `Transformer`, which is a plain Linen module outside of a mesh.
"""

import dataclasses
import fnmatch
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from benchmarks.random_models import (
    CLASSES,
    FEATURES,
    VOCABULARY,
    ConvNet,
    Mlp,
    Recurrent,
    TextModel,
)
from benchmarks.random_nnx_models import XMlp, XText, run_plainly
from manualpar import Column, Row, Vocab, gather_examples, lora, quantized, tensor_parallel
from manualpar.layers import split_argmax, split_cross_entropy
from manualpar.layers.vocabulary import vocabulary_axes
from manualpar.models.flat_fields import nest_fields
from manualpar.models.transformer import Transformer

Tree = Any


def _transformer(**fields: Any) -> Transformer:
    return Transformer(**nest_fields(fields))


KINDS: Mapping[str, Any] = {
    "mlp": Mlp,
    "conv": ConvNet,
    "text": TextModel,
    "rnn": Recurrent,
    "transformer": _transformer,
    "nnx_mlp": XMlp,
    "nnx_text": XText,
}


@dataclasses.dataclass(frozen=True)
class Plain:
    """The reference model for one device.

    Attributes:
      init: `init(key, inputs)` returns the variables by collection.
      apply: Like `flax.linen.Module.apply`.
      to_plain: Converts the program's parameters to this model's parameters.
    """

    init: Callable[[jax.Array, Any], Any]
    apply: Callable[..., Any]
    to_plain: Callable[[Tree], Tree]


def make_model(row: Mapping[str, Any]) -> tuple[Any, Plain]:
    """Makes the model of a program from its description, and the reference model."""
    kind, fields = KINDS[row["model"]], dict(row["fields"])
    if row["model"].startswith("nnx"):

        def make(rngs: nnx.Rngs) -> nnx.Module:
            rules = row.get("rules")
            is_synced = rules and fields.get("norm") == "synced"
            # qwix calls the model outside of a mesh, where its norm can name no axis.
            own = {**fields, "norm": "batch"} if is_synced else fields
            module: nnx.Module = kind(**own, rngs=rngs)
            if rules:
                module = with_rules(module, rules, make_batches(row, 1)[0]["inputs"][:2])
            if is_synced:
                module.set_attributes(nnx.BatchNorm, axis_name="batch")
            return module

        return make, Plain(*run_plainly(make), lambda params: params)
    module: nn.Module = kind(**fields)
    bare = module
    if "norm" in fields and fields["norm"] == "synced":
        bare = kind(**{**fields, "norm": "batch"})
    unquantized = bare
    model: Any = module
    if rules := row.get("rules"):
        model, bare = (with_rules(each, rules) for each in (module, bare))
    if plan := row.get("plan"):
        model = tensor_parallel(model, plan_of(row), **plan)
    if row.get("quantized"):
        model = quantized(model, {"*kernel": row["quantized"]})
    if targets := row.get("lora"):
        model = lora(model, targets["targets"], alpha=targets["alpha"])

    def init(key: jax.Array, inputs: Any) -> Any:
        return nn.unbox(unquantized.init({"params": key}, inputs, train=False))

    return model, Plain(init, bare.apply, lambda params: _plain_params(row, params))


# The fields of qwix's rules.
RULES: Mapping[str, Mapping[str, str]] = {
    "weights int8": {"weight_qtype": "int8"},
    "weights float8": {"weight_qtype": "float8_e4m3fn"},
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "w8a8g8": {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
    "float8": {
        "weight_qtype": "float8_e4m3fn",
        "act_qtype": "float8_e4m3fn",
        "bwd_qtype": "float8_e5m2",
    },
}


def with_rules(model: Any, rules: Mapping[str, str], *inputs: Any) -> Any:
    """Returns the model with qwix's rule for some of its products; `inputs` for an NNX model."""
    qwix = importlib.import_module("qwix")
    rule = qwix.QtRule(module_path=rules["modules"], **RULES[rules["kind"]])
    return qwix.quantize_model(model, qwix.QtProvider([rule]), *inputs)


def plan_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's tensor-parallel plan: it splits attention heads and hidden features."""
    if row["model"] == "mlp":
        return {"*/up": Column(), "*/down": Row()}
    plan: dict[str, Any] = {f"*/attention/{name}": Column(-2) for name in ("query", "key", "value")}
    plan |= {"*/attention/out": Row(-3), "*/up": Column(), "*/down": Row()}
    if row["fields"]["tied"] or row["plan"]["sequence"]:
        plan["embed"] = Vocab()
        plan |= {} if row["fields"]["tied"] else {"head": Column()}
    return plan


def _plain_params(row: Mapping[str, Any], params: Tree) -> Tree:
    """Dequantizes kernels and merges adapters into them, by the documented formulas."""
    flat = flatten_dict(params, sep="/")
    for path in [path for path in flat if path.endswith("_codes")]:
        codes, scales = flat.pop(path), flat.pop(path.replace("_codes", "_scales"))
        block = -(-codes.shape[-1] // scales.shape[-1])
        each = jnp.repeat(scales, block, axis=-1)[..., : codes.shape[-1]]
        flat[path.removesuffix("_codes")] = codes.astype(scales.dtype) * each
    if targets := row.get("lora"):
        for path in [path for path in flat if path.endswith("lora_a")]:
            module = path.rpartition("/")[0]
            a, b = flat.pop(path), flat.pop(f"{module}/lora_b")
            rank = next(r for g, r in targets["targets"].items() if fnmatch.fnmatchcase(module, g))
            kernel = flat[f"{module}/kernel"]
            multiply = functools.partial(jnp.tensordot, axes=1)
            if a.ndim + b.ndim - 2 > kernel.ndim:  # In a scan, dim 0 of both counts the layers.
                multiply = jax.vmap(multiply)
            product = multiply(a, b)
            flat[f"{module}/kernel"] = kernel + product * (targets["alpha"] / rank)
    return unflatten_dict(flat, sep="/")


def make_batches(row: Mapping[str, Any], number: int) -> list[dict[str, np.ndarray | Any]]:
    """Makes `number` batches of NumPy arrays: `inputs`, `labels`, and `mask` for some losses."""
    random = np.random.default_rng(row["data_seed"])
    size, length, kind = row["batch"], row["length"], row["model"]
    shapes = {"mlp": (FEATURES,), "nnx_mlp": (FEATURES,), "conv": (6, 6, 3), "rnn": (5, 4)}
    batches = []
    for _ in range(number):
        if kind in shapes:
            inputs: Any = random.normal(size=(size, *shapes[kind])).astype(np.float32)
            labels = random.integers(0, CLASSES, size)
        else:
            tokens = random.integers(0, VOCABULARY, (size, length + 1))
            inputs, labels = tokens[:, :-1].astype(np.int32), tokens[:, 1:]
            if row.get("packed"):
                borders = random.random((size, length)) < 0.3
                inputs = {"tokens": inputs, "documents": borders.cumsum(1).astype(np.int32)}
        batch = {"inputs": inputs, "labels": labels.astype(np.int32)}
        if row["loss"] == "masked":
            mask = random.random(labels.shape) > 0.3
            mask[size // 4 : size // 2 + 1] = False  # So some devices have no examples.
            batch["mask"] = mask.astype(np.float32)
        elif row["loss"] == "weights":
            batch["mask"] = random.uniform(0.2, 3, labels.shape).astype(np.float32)
        elif row["loss"] == "fractions":  # The weights of a share add up to less than 1.
            mask = random.uniform(0.001, 0.02, labels.shape) * (random.random(labels.shape) > 0.3)
            batch["mask"] = mask.astype(np.float32)
        batches.append(batch)
    return batches


def _among_all(out: Any, labels: Any, *, is_plain: bool) -> tuple[jax.Array, jax.Array]:
    """Computes a contrastive loss over all examples, after subtracting the mean row."""
    own = jax.nn.one_hot(labels, out.shape[-1])
    every, targets = (x if is_plain else gather_examples(x) for x in (out, own))
    mean = every.mean(0, keepdims=True)
    scores = out @ (targets - mean).T
    score = (out * (own - mean)).sum(-1)
    return jax.nn.logsumexp(scores, axis=-1) - score, score >= scores.max(-1) - 1e-4


# The forms of a loss whose counts depend on parameters.
LEARNED = ("learned", "learned pair")
TERMS = ("loss", "decay", "z_loss", "sown", "rare")


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a loss, from which each form of a loss is made.

    Attributes:
      mean: The mean over the valid examples.
      terms: The sum and the count of each term.
      metrics: Other metrics.
    """

    mean: jax.Array
    terms: dict[str, Any]
    metrics: dict[str, Any]


def make_loss(row: Mapping[str, Any]) -> Callable[..., Any]:
    """Makes the program's loss function from a description."""
    parts, form = make_parts(row, is_plain=False), row.get("form", "pair")

    def shaped(of: Parts) -> Any:
        if form == "scalar":
            return of.mean
        if form in ("pair", "learned pair"):
            return of.mean, {"loss": of.terms["loss"], **of.metrics}
        return (of.terms, of.metrics) if row["has_metrics"] else of.terms

    if row.get("by_model"):

        def of_model(model: Any, batch: Any) -> Any:
            def apply_fn(variables: Any, inputs: Any, **call: Any) -> Any:
                return model(inputs)

            found = [x for _, x in nnx.to_flat_state(nnx.state(model, nnx.Param))]
            params = [x[...] for x in found] if row["loss_extras"]["decay"] else None
            return shaped(parts(params, apply_fn, batch, None))

        return of_model
    return lambda params, apply_fn, batch, rng: shaped(parts(params, apply_fn, batch, rng))


def make_parts(row: Mapping[str, Any], *, is_plain: bool) -> Callable[..., Parts]:
    """Makes a function that computes the parts of a loss; with `is_plain` on one device."""
    kind, extras, form = row["loss"], row["loss_extras"], row.get("form", "pair")
    sows = {"mlp": "aux", "nnx_mlp": "Seen"}[row["model"]] if row["fields"].get("sown") else ""
    has_terms = form in ("terms", "learned")
    is_whole = not row.get("with_labels") and not row.get("split_logits")

    def parts(params: Any, apply_fn: Any, batch: Any, rng: Any) -> Parts:
        call: dict[str, Any] = {"train": True, "rngs": {"dropout": rng}}
        sown: Any = {}
        if row.get("with_labels"):
            call["labels"] = batch.labels
        wanted = ["intermediates"] if extras.get("penalty") else []
        wanted += ["losses"] if extras.get("balance") else []
        wanted += [sows] if sows else []
        if wanted:
            out, sown = apply_fn({"params": params}, batch.inputs, mutable=wanted, **call)
        else:
            out = apply_fn({"params": params}, batch.inputs, **call)
        if kind == "coupled":
            losses, correct = _among_all(out, batch.labels, is_plain=is_plain)
        elif row.get("with_labels"):
            losses, correct = out
        elif is_plain or not row.get("split_logits"):
            losses = optax.softmax_cross_entropy_with_integer_labels(out, batch.labels)
            correct = out.argmax(-1) == batch.labels
        else:
            losses = split_cross_entropy(out, batch.labels)
            correct = split_argmax(out, vocabulary_axes(out, batch.labels)) == batch.labels
        if extras.get("smoothing") and is_whole:
            losses = 0.9 * losses - 0.1 * jax.nn.log_softmax(out).mean(-1)
        z = jnp.square(jax.nn.logsumexp(out, axis=-1)) if extras.get("z") and is_whole else None
        if z is not None and not has_terms:
            losses = losses + 0.01 * z
        if extras.get("penalty"):
            losses = losses + 0.1 * sown["intermediates"]["squares"][0]
        if sows:
            each, means = (_sown(sown[sows], name) for name in ("each", "mean"))
            losses = (losses + 0.1 * sum(x.reshape(-1, len(losses)).sum(0) for x in each)) ** 2
            mean = 0.1 * sum(x.sum() for x in means)
            # Weights of examples would weigh the means of the devices.
            is_plain_mean = batch.mask is None and not has_terms and form not in LEARNED
            losses = losses + mean if is_plain_mean else losses
        weights, correct = batch.mask, correct.astype(losses.dtype)
        if form in LEARNED:
            learned = jax.nn.sigmoid(out[..., 0])
            weights = learned if weights is None else learned * weights
        if weights is None:
            average, total, count = losses.mean(), losses.sum(), losses.size
            hits = correct.sum()
        else:
            count = weights.sum()
            total, hits = (losses * weights).sum(), (correct * weights).sum()
            average = total / jnp.where(count > 0, count, 1)
        terms: dict[str, Any] = {"loss": (total, count)}
        decay = 0
        if extras.get("decay"):
            squares = [jnp.square(x).sum() for x in jax.tree.leaves(nn.unbox(params))]
            decay = extras["decay"] * sum(squares)
            average = average + decay
        if has_terms:
            terms |= {"decay": (decay * len(losses), len(losses))} if extras.get("decay") else {}
            terms |= {"z_loss": (0.01 * z.sum(), z.size)} if z is not None else {}
            terms |= {"sown": (mean * len(losses), len(losses))} if sows else {}
            if extras.get("rare"):  # Many shares have no example of this kind.
                is_rare = (batch.labels == 0).astype(losses.dtype)
                terms["rare"] = ((0.3 * losses * is_rare).sum(), is_rare.sum())
        return Parts(average, terms, {"accuracy": (hits, count)})

    return parts


def _sown(collection: Any, name: str) -> list[jax.Array]:
    """Returns all values of a name that layers have sown."""
    found = jax.tree_util.tree_leaves_with_path(collection)
    return [x for path, x in found if any(getattr(key, "key", "") == name for key in path)]
