"""Draws the parts of `random_programs` that are not about devices: model, loss, optimizer, LoRA."""

import random
from collections.abc import Mapping
from typing import Any

from benchmarks.random_optimizers import OPTIMIZERS

# The models of programs that have a feature of `draw_found`: mostly small ones.
FOUND_MODELS = {"mlp": 12, "nnx_mlp": 7, "text": 3, "conv": 1, "rnn": 1, "nnx_text": 1}
FOUND_MODELS |= {"transformer": 1}
MODELS = {"mlp": 4, "conv": 1, "text": 3, "rnn": 1, "transformer": 5, "nnx_mlp": 2, "nnx_text": 1}
# Globs of trainable parameters for each model; the first entry matches no quantized parameter.
TRAINABLE = {
    "mlp": (["*bias"], ["*head*"], ["*kernel"]),
    "conv": (["*bias"], ["*kernel"], ["head/*"]),
    "text": (["*bias", "*scale"], ["*kernel"], ["*up*", "*out*"]),
    "rnn": (["*bias"], ["*kernel"], ["head/*"]),
    "transformer": (["*scale"], ["*kernel", "*embedding"], ["*embedding"], ["*attention/*"]),
    "nnx_mlp": (["*bias"], ["*kernel"], ["head/*"]),
    "nnx_text": (["*bias", "*scale"], ["*kernel"], ["*embed*", "*up*"]),
}
Row = dict[str, Any]


def weighted(r: random.Random, weights: Mapping[str, int]) -> str:
    """Draws a name, with probabilities in proportion to the weights."""
    return r.choices(list(weights), list(weights.values()))[0]


def draw_model(r: random.Random, row: Row, models: Mapping[str, int] = MODELS) -> None:
    """Adds model, data, loss, optimizer and fine-tuning to a description."""
    kind = weighted(r, models)
    row["model"], row["data_seed"] = kind, r.randrange(10**6)
    row["batch"], row["length"] = r.choice((8, 8, 12, 24)), 8
    row["loss"] = r.choice(("mean", "mean", "masked", "masked", "weights"))
    row["loss_extras"] = extras = {}
    extras["decay"] = r.choice((0, 0, 0, 0.01))
    row["tx"], row["ema"] = r.choice(["sgd", *OPTIMIZERS]), r.random() < 0.15
    fields: Row = {}
    row["fields"] = fields
    dropout = r.choice((0.0,) * 7 + (0.25,))
    if kind != "transformer":
        extras["smoothing"], extras["z"] = r.random() < 0.15, r.random() < 0.15
    if kind == "mlp":
        fields.update(
            width=r.choice((6, 8, 9, 16)),
            depth=r.choice((1, 2, 4)),
            act=r.choice(("relu", "gelu", "tanh")),
            bias=r.random() < 0.7,
            norm=r.choice(("layer", "layer", "none", "batch", "synced")),
            scan=r.random() < 0.5,
            remat=r.random() < 0.4,
            dropout=dropout,
            annotated=r.random() < 0.15,
            counts=r.random() < 0.15,
            penalty=r.random() < 0.15,
            odd=r.random() < 0.12,
        )
        if r.random() < 0.12 and fields["norm"] != "batch":
            row["loss"] = "coupled"
        extras["penalty"] = fields["penalty"]
    elif kind == "conv":
        fields.update(
            channels=r.choice((4, 6, 8)),
            norm=r.choice(("none", "group", "batch", "synced")),
            dropout=dropout,
        )
    elif kind == "text":
        fields.update(
            depth=r.choice((1, 2, 2, 2, 4)),
            tied=r.random() < 0.5,
            bias=r.random() < 0.6,
            scan=r.random() < 0.5,
            remat=r.random() < 0.4,
            dropout=dropout,
        )
    elif kind == "rnn":
        fields.update(cell=r.choice(("lstm", "gru", "simple")), width=r.choice((6, 8)))
    elif kind == "nnx_mlp":
        fields.update(
            width=r.choice((6, 8, 16)),
            depth=r.choice((2, 4)),
            norm=r.choice(("none", "none", "batch", "synced")),
            scan=r.random() < 0.5,
            dropout=dropout,
        )
    elif kind == "nnx_text":
        fields.update(tied=r.random() < 0.5, lora=r.random() < 0.4)
    else:
        _draw_transformer(r, row, dropout)
    _draw_tuning(r, row)


def _draw_transformer(r: random.Random, row: Row, dropout: float) -> None:
    fields = row["fields"]
    fields.update(vocab_size=24, num_layers=r.choice((2, 2, 2, 2, 4)), hidden_size=16, num_heads=4)
    fields.update(mlp_size=r.choice((16, 24)), scan_layers=r.random() < 0.75, dropout_rate=dropout)

    def maybe(share: float, **values: Any) -> bool:
        chosen = r.random() < share
        if chosen:
            fields.update(values)
        return chosen

    maybe(0.4, num_kv_heads=r.choice((1, 2)))
    maybe(0.3, tied_head=True)
    row["with_labels"], row["packed"] = r.random() < 0.5, r.random() < 0.35
    if r.random() < 0.25:  # `export_hf` can write this family of models.
        row["has_family"] = True
        maybe(0.3, qkv_bias=True)
        if maybe(0.5, split_axis="model"):
            row["split_logits"], row["loss_extras"]["decay"] = True, 0
        return
    maybe(0.2, norm_offset=True, scale_embedding=True)
    maybe(0.2, post_norms=True)
    maybe(0.2, query_key_norm=True)
    maybe(0.2, qkv_bias=True)
    maybe(0.15, rope_scaling=r.choice(("linear", "llama3")), rope_factor=2.0)
    maybe(0.15, logit_soft_cap=10.0)
    maybe(0.15, attention_soft_cap=5.0)
    maybe(0.15, label_smoothing=0.1)
    maybe(0.15, z_loss=0.01)
    maybe(0.4, remat=r.choice(("full", "dots")))
    if maybe(0.25, attention_window=3) and fields["num_layers"] == 4:
        maybe(0.5, global_every=2, local_rope_base=5000.0)
    row["with_labels"] |= bool(fields.get("label_smoothing") or fields.get("z_loss"))
    if not row["packed"]:
        maybe(0.2, bos_token=0)
    if r.random() < 0.4:
        fields.update(num_experts=4, experts_per_token=r.choice((1, 2, 3)))
        fields["capacity_factor"] = r.choice((0.0, 0.6, 1.0, 1.25, 2.0))
        maybe(0.3, expert_gates="sigmoid")
        maybe(0.3, normalize_gates=False)
        maybe(0.2, gate_scale=2.5)
        maybe(0.2, router_bias=True)
        if fields["experts_per_token"] < 3:
            maybe(0.2, expert_groups=2, expert_groups_per_token=1)
        if maybe(0.3, shared_experts_size=8):
            maybe(0.5, shared_gate=True)
        if not fields.get("global_every"):
            maybe(0.2, dense_layers=1)
    elif r.random() < 0.2:
        fields["activation"] = "gelu"
    maybe(0.3, context_axis="context", context_attention=r.choice(("ring", "ulysses", "gather")))
    if fields.get("context_axis"):
        row["length"] = 16
        fields["num_kv_heads"] = r.choice((0, 2))
    if maybe(0.45, split_axis="model"):
        row["split_logits"] = True
        row["loss_extras"]["decay"] = 0
        maybe(0.5, sequence_parallel=True)
        if fields.get("sequence_parallel"):
            maybe(0.3, overlap="ring")
    if fields.get("num_experts") and maybe(0.5, expert_axis="expert"):
        row["loss_extras"]["decay"] = 0  # The decay would cover only a device's experts.


def _draw_tuning(r: random.Random, row: Row) -> None:
    """Adds a tensor-parallel plan, LoRA, int8 base weights and `trainable` to a description."""
    kind, fields = row["model"], row["fields"]
    may_split = kind == "text" or (kind == "mlp" and not fields["annotated"] and r.random() < 0.3)
    if may_split and r.random() < 0.5:
        row["plan"] = plan = {"sequence": kind == "text" and r.random() < 0.4}
        if plan["sequence"]:
            fields["places"] = False
            plan["overlap"] = r.choice(("none", "none", "ring"))
        row["split_logits"] = bool(fields.get("tied")) or plan["sequence"]
        row["loss_extras"]["decay"] = 0  # The decay would cover only a device's shards.
    targets = {
        "mlp": ["*/up", "*/down"],
        "text": ["*/query", "*/value", "*/up", "*/out"],
        "transformer": ["*/query", "*/value", "*/out"],
    }.get(kind)
    if targets and r.random() < 0.25:
        chosen = r.sample(targets, r.choice((1, 2)))
        row["lora"] = {"targets": {name: r.choice((1, 2, 3)) for name in chosen}, "alpha": 4.0}
    if targets and r.random() < (0.5 if "lora" in row else 0.1):
        row["quantized"] = r.choice((4, 8, 64))
    if ("quantized" in row and "lora" not in row) or r.random() < 0.12:
        fitting = TRAINABLE[kind][: 1 if "quantized" in row else None]
        row["trainable"] = [*r.choice(fitting), *(["*lora*"] if "lora" in row else [])]
    if fields.get("odd"):
        row["trainable"] = ["*kernel", "*bias", "gain", "idle"]
        row.pop("quantized", None)
        row.pop("lora", None)
    if "lora" in row or "quantized" in row:
        row["loss_extras"]["decay"] = 0  # The plain model on one device has other parameters.
    if "trainable" in row or "lora" in row:
        row["frozen_dtype"] = r.choice((None, None, None, "bfloat16"))


def draw_found(r: random.Random, row: Row) -> None:
    """Draws a model like `draw_model`, and often a form of loss, sown values, skips or rules.

    `found` names what it has. If that is nothing, the program has threads or other devices.
    """
    draw_model(r, row, FOUND_MODELS)
    kind, fields, extras = row["model"], row["fields"], row["loss_extras"]
    row["tx"], row["ema"] = r.choice(("sgd", "sgd", "momentum", "adamw")), False
    if row["loss"] != "coupled":
        row["loss"] = r.choice(("mean", "masked", "weights", "fractions", "fractions"))
    row["found"] = r.choice(("", "loss", "loss", "loss"))
    if kind == "mlp" and not fields["odd"] and r.random() < 0.7:
        fields["sown"] = r.choice(("", "tuple", "reduced", "beside"))
        fields["drop"] = r.choice(("", "random", "data", "index"))
        fields["branch"] = r.choice(("cond", "switch", "nested"))
        fields["depth"] = 2
    elif kind == "nnx_mlp" and r.random() < 0.7:
        fields["sown"] = r.choice(("", "tuple", "reduced"))
        # A function of JAX may not change the state of `nnx.Dropout`.
        fields["drop"] = r.choice(("", "nnx" if fields["dropout"] else "lax", "nnx"))
    meets = fields.get("norm") == "synced" or row["loss"] == "coupled"
    if meets and fields.get("drop") in ("data", "lax", "nnx"):  # The reference cannot have both.
        fields["drop"] = "index" if kind == "mlp" else ""
    if kind in ("mlp", "text", "nnx_mlp") and not fields.get("odd") and r.random() < 0.3:
        _draw_rules(r, row, meets=meets)
    is_whole = not row.get("with_labels") and not row.get("split_logits")
    if row["found"] == "loss":
        _draw_form(r, row, is_whole=is_whole)
    has = [name for name in ("sown", "drop") if fields.get(name)]
    row["found"] = " ".join([*has, *(["rules"] if "rules" in row else [])]) or row["found"]
    if row.get("form") in ("terms", "learned") and is_whole:
        extras["z"], extras["rare"] = r.random() < 0.6, r.random() < 0.5


def _draw_form(r: random.Random, row: Row, *, is_whole: bool) -> None:
    """Draws the form of the loss, and what counts its examples."""
    fields = row["fields"]
    forms = ["terms", "terms", "scalar", "pair"]
    forms += ["learned", "learned", "learned pair"] if is_whole else []
    row["form"] = r.choice(forms)
    row["has_metrics"] = r.random() < 0.5
    if row["form"].startswith("learned"):
        fields.pop("dropout", None)
        fields.pop("dropout_rate", None)
        fields["drop"] = "data" if fields.get("drop") == "random" else fields.get("drop", "")
        if not fields["drop"]:
            del fields["drop"]
    if row["form"] == "scalar" and row["loss"] != "coupled":
        row["loss"] = "mean"
    if row["form"] == "pair":
        row["loss"] = row["loss"] if row["loss"] == "coupled" else "fractions"
    # flax's guides of NNX write `loss_fn(model, batch)`.
    can = row["model"].startswith("nnx") and row["form"] != "pair" and not fields.get("sown")
    row["by_model"] = can and r.random() < 0.6


def _draw_rules(r: random.Random, row: Row, *, meets: bool) -> None:
    """Draws rules of qwix, which quantize some products of the model.

    `meets` is whether the model or the loss combines examples of all devices.
    """
    for name in ("lora", "quantized", "trainable", "frozen_dtype"):
        row.pop(name, None)
    kinds = ("weights int8", "weights float8", "w8a8", "w8a8g8", "float8")
    # Each device has its own scale, of its rows of a kernel and of its examples.
    if row.get("plan") or meets:
        row["rules"] = {"kind": r.choice(kinds[:2]), "modules": ".*up"}
    else:
        row["rules"] = {"kind": r.choice(kinds), "modules": r.choice((".*up", ".*(up|down)"))}
