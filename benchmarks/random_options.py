"""Draws descriptions of programs for `random_programs`; a program's number determines it.

Four consecutive numbers share the model, the loss, the batches and the optimizer, so that the
functions compiled for one device serve all four. A description contains values that JSON can
represent, and determines the program completely.

Programs from number `FOUND` on have at least one of the features that were once found to be wrong
by hand: losses of several terms and other forms, values that a model sows, layers that are skipped,
rules of qwix, two threads, a run that comes back with other devices. Their models are smaller.
"""

import math
import random
from typing import Any

from benchmarks.random_model_options import draw_found, draw_model, weighted

SHARE = 4
FOUND, FOUND_SHARE = 100_000, 6
STRATEGIES = {"data_parallel": 1, "zero1": 1, "zero2": 1, "fsdp": 4, "hsdp": 2, "diloco": 1}
Row = dict[str, Any]


def draw(number: int) -> Row:
    """Draws the description of the program with a number."""
    row: Row = {"number": number}
    if number < FOUND:
        draw_model(random.Random(f"model {number // SHARE}"), row)
        _draw_program(random.Random(f"program {number}"), row)
        return row
    draw_found(random.Random(f"found model {number // FOUND_SHARE}"), row)
    r = random.Random(f"found program {number}")
    _draw_program(r, row)
    _draw_division(r, row)
    return row


def _draw_division(r: random.Random, row: Row) -> None:
    """Makes some programs two in threads, or a run that comes back with other devices."""
    options = row["options"]
    # JAX's sharding types refuse most of these models.
    is_refused = row["fields"].get("drop") or "rules" in row
    if row["mode"] == "explicit" and is_refused and r.random() < 0.8:
        row["mode"], row["typed_mesh"] = "auto", False
    if r.random() < 0.6:  # Programs from 0 on move their states more often.
        row.pop("trip", None)
    row["evaluates"] = row["evaluates"] and r.random() < 0.5
    is_diloco, is_large = row["strategy"] == "diloco", row["model"] == "transformer"
    if is_diloco and row["found"]:
        return
    share = 0.06 if row["found"] else 1.0 if is_large else 0.5
    if not is_diloco and r.random() < share:
        row["threads"] = _draw_trip(r, row)
        row["nan_at"] = False
    elif not is_large and r.random() < (0.2 if row["found"] else 1):
        sizes = [n for n in (1, 2, 4, 8) if row["batch"] % n == 0]
        row["mesh"] = {"data": r.choice(sizes[1:])}
        row["elastic"] = r.choice([n for n in sizes if n != row["mesh"]["data"]])
        row["strategy"] = r.choice(("data_parallel", "zero1", "zero2", "fsdp", "fsdp"))
        row["typed_mesh"] = row["nan_at"] = False
        row["mode"] = r.choice(("manual", "manual", "manual", "auto"))
        kept = "num_minibatches", "sync_collections"
        options = {name: options[name] for name in kept if name in options}
        each = row["batch"] // row["mesh"]["data"]
        options["num_minibatches"] = r.choice([m for m in (1, 1, 2, 3) if each % m == 0])
        if row["fields"].get("norm") == "synced":
            options["axis_aliases"] = {"batch": ["data"]}
        if row["strategy"] != "data_parallel":
            options["min_weight_size"] = r.choice((0, 30, 100))
        row["options"] = options
        for name in ("trip", "pipeline", "plan", "split_logits", "diloco"):
            row.pop(name, None)
        row["fields"].pop("annotated", None)


def _draw_program(r: random.Random, row: Row) -> None:
    fields: Row = row["fields"]
    options: Row = {}
    row["strategy"] = weighted(r, STRATEGIES)
    row["mode"] = r.choice(("manual",) * 8 + ("auto", "explicit"))
    if row["strategy"] == "diloco" and r.random() < 0.95:
        row["mode"] = "manual"
    row["typed_mesh"] = r.random() < (0.5 if row["mode"] == "explicit" else 0.05)
    row["options"] = options
    mesh: dict[str, int] = {}
    left = 8

    def axis(name: str, *sizes: int) -> int:
        nonlocal left
        fitting = [size for size in sizes if size <= left]
        mesh[name] = r.choice(fitting or [1])
        left //= mesh[name]
        return mesh[name]

    splits = fields.get("split_axis") or row.get("plan") is not None or fields.get("annotated")
    if splits and r.random() < 0.85:
        axis("model", 2, 2, 4)
    if fields.get("context_axis") and r.random() < 0.8:
        axis("context", 2, 2, 4, 1)
        options["context_axis"] = "context"
    scanned = fields.get("scan") or fields.get("scan_layers")
    layers: int = fields.get("depth") or fields.get("num_layers") or 1
    layers -= fields.get("dense_layers", 0)
    can_cut = row["mode"] == "manual" and scanned and row["strategy"] != "zero2"
    has_statistics = fields.get("norm") in ("batch", "synced") or fields.get("counts")
    has_statistics = has_statistics or row["loss"] == "coupled"
    if "found" in row:
        has_statistics |= row.get("form", "").startswith("learned") and r.random() < 0.9
    can_cut = can_cut and not row["loss_extras"]["decay"] and not has_statistics
    if can_cut and r.random() < 0.45:
        groups = layers // (fields.get("global_every") or 1)
        stages = axis("stage", *[n for n in (2, 4) if groups % n == 0 or r.random() < 0.05])
        row["pipeline"] = {
            "schedule": r.choice(("1f1b", "gpipe")),
            "chunks": 2 if layers % (2 * stages) == 0 and r.random() < 0.4 else 1,
            "keep": r.choice(("residuals", "inputs")),
        }
    names = []
    if fields.get("expert_axis") and r.random() < 0.8:
        axis("expert", 2, 2, 4)
        names.append("expert")
    if row["strategy"] in ("hsdp", "diloco"):
        axis("replica", 1, 2, 2, 4)
    whole = math.prod(mesh.get(name, 1) for name in ("expert", "replica"))
    sizes = [n for n in (1, 2, 3, 4, 6, 8) if row["batch"] % (n * whole) == 0 and n <= left]
    axis("data", *(sizes + sizes[1:] * 2 or [1]))
    names.append("data")
    if left >= 2 and r.random() < 0.25 and row["batch"] % (2 * whole * mesh["data"]) == 0:
        axis("minor", 2)
        names.append("minor")
    row["mesh"] = mesh
    if names != ["data"]:
        options["axis_name"] = names
        options["axis_by_axis"] = row["mode"] == "manual" and r.random() < 0.4
    share = row["batch"] // (whole * mesh["data"] * mesh.get("minor", 1))
    options["num_minibatches"] = r.choice([m for m in (1, 1, 1, 2, 2, 3, 4) if share % m == 0])
    if options["num_minibatches"] > 1 and "pipeline" not in row:
        options["use_scan"] = r.random() < 0.8
    _draw_strategy(r, row, names)
    _draw_wire(r, row)
    options["norm_metrics"] = r.random() < 0.2
    options["nonfinite"] = r.choice(("ignore",) * 5 + ("report", "skip"))
    row["nan_at"] = options["nonfinite"] != "ignore" and r.random() < 0.5
    options["eval_dropout"] = r.random() < 0.03
    if fields.get("annotated"):
        axis_of = "model" if "model" in mesh else None
        options["rules"] = [["features", None], ["hidden", r.choice((axis_of, None))]]
    if fields.get("counts"):
        options["sync_collections"] = {"stats": "sum", "stats/largest": "max"}
    if fields.get("norm") == "synced":
        options["axis_aliases"] = {
            "batch": [*(["replica"] if row["strategy"] == "hsdp" else []), *names]
        }
    row["evaluates"], row["given"] = r.random() < 0.45, r.random() < 0.5
    if row["strategy"] != "diloco" and r.random() < 0.25:
        row["trip"] = _draw_trip(r, row)


def _draw_strategy(r: random.Random, row: Row, names: list[str]) -> None:
    options, strategy = row["options"], row["strategy"]
    if strategy == "diloco":
        row["diloco"] = {
            "every": r.choice((1, 2, 3)),
            "outer": r.choice(("mean", "nesterov")),
            "inner": r.choice(("data_parallel", "zero1", "zero2", "fsdp", "fsdp")),
        }
        if r.random() < 0.2:
            row["diloco"]["outer_code"] = r.choice(("int8", "int4"))
        if r.random() < 0.2:
            row["diloco"]["outer_fragments"] = r.randint(1, row["diloco"]["every"])
        if r.random() < 0.15:
            row["diloco"]["outer_overlap"] = True
    inner = row["diloco"]["inner"] if strategy == "diloco" else strategy
    if inner == "data_parallel":
        return
    if r.random() < 0.9:
        options["min_weight_size"] = r.choice((0, 1, 30, 64, 100))
    options["pad"] = r.random() < 0.35
    if r.random() < 0.08:
        options["replicate"] = [_name_in(row)]
    if inner not in ("fsdp", "hsdp"):
        return
    options["reshard_after_forward"] = r.random() < 0.75
    every = r.choice(("minibatch",) * 4 + ("step", "gather-step"))
    if "pipeline" in row and every == "gather-step":
        every = "step"
    options["communicate_every"] = every
    if r.random() < 0.12:
        options["keep_gathered"] = [_name_in(row)]
    can = len(names) > 1 and every == "minibatch" and row["mode"] == "manual"
    if can and "pipeline" not in row and r.random() < 0.4:
        options["regather_axes"] = names[:1]
        options["reshard_after_forward"] = True


def _name_in(row: Row) -> str:
    """Returns the name of a module or parameter that the described model has, such as "head"."""
    fields, kind = row["fields"], row["model"]
    if kind == "transformer":
        return "final_norm" if fields.get("tied_head") else "head"
    tied = kind == "text" or kind == "nnx_text"
    return "embed" if tied and fields.get("tied") else "head"


def _draw_wire(r: random.Random, row: Row) -> None:
    """Adds options for dtypes and quantization, in storage and in communication."""
    options = row["options"]
    if "frozen_dtype" in row:
        options["frozen_dtype"] = row.pop("frozen_dtype")
    if r.random() < 0.1:
        options["gather_dtype"] = "bfloat16"
    # In bfloat16 the decays of `inject_hyperparams` round to 1, and its updates are NaN.
    if r.random() < 0.06 and row["tx"] != "inject":
        options["param_dtype"] = "bfloat16"
    # JAX refuses a scan whose carry changes its dtype, see docs/limits.md.
    if row["model"] == "text" and row["fields"]["scan"]:
        for name in ("frozen_dtype", "gather_dtype", "param_dtype"):
            options.pop(name, None)
    if row["mode"] != "manual":
        return
    if r.random() < 0.08:
        options["reduce_dtype"] = r.choice(("bfloat16", "float32"))
    if r.random() < 0.12:
        options["gather_code"] = "int8"
    if r.random() < 0.2:
        options["reduce_code"] = r.choice(("int8", "int4", "bfloat16"))
        once = "pipeline" not in row and row["strategy"] in ("data_parallel", "zero1", "hsdp")
        once |= "pipeline" not in row and options.get("communicate_every") == "step"
        options["error_feedback"] = once and row["strategy"] != "diloco" and r.random() < 0.6
        options["stochastic_rounding"] = r.random() < 0.3


def _draw_trip(r: random.Random, row: Row) -> Row:
    """Draws a move of the state to another program, whose mesh may lack the model axis."""
    kept = {name: row["mesh"][name] for name in ("model",) if name in row["mesh"]}
    if r.random() < 0.5 or row["fields"].get("sequence_parallel"):
        kept = {}
    room = 8 // math.prod(kept.values())
    size = r.choice([n for n in (1, 2, 4, 8) if n <= room and row["batch"] % n == 0])
    strategy = r.choice(("data_parallel", "zero1", "zero2", "fsdp", "fsdp"))
    kinds = ["adopt", "checkpoint", "init_from", "bytes", "checkpoint"]
    if row.get("has_family") and "lora" not in row:
        kinds += ["files"] * 5
    if "lora" in row:
        kinds += ["adapters", "adapters"]
    options: Row = {}
    if strategy != "data_parallel":
        options = {"min_weight_size": r.choice((1, 64)), "pad": r.random() < 0.5}
    return {
        "kind": r.choice(kinds),
        "strategy": strategy,
        "mesh": {**kept, "data": size},
        "options": options,
        "step": r.random() < 0.4,
    }


def features_of(row: Row) -> list[str]:
    """Returns the features of a program, such as "LoRA", by which results are counted."""
    fields, options = row["fields"], row["options"]
    codes = {options.get("gather_code"), options.get("reduce_code")}
    codes.add(row.get("diloco", {}).get("outer_code"))
    has = {
        "NNX": row["model"].startswith("nnx"),
        "LoRA": "lora" in row,
        "int8 base": "quantized" in row,
        "packed": bool(row.get("packed")) or "bos_token" in fields,
        "plan": row.get("plan") is not None,
        "split layers": "split_axis" in fields,
        "experts": "num_experts" in fields,
        "dropout": bool(fields.get("dropout") or fields.get("dropout_rate")),
        "int4": "int4" in codes,
        "int8": "int8" in codes,
        "pipeline": "pipeline" in row,
        "context": "context_axis" in options,
        "minibatches": options["num_minibatches"] > 1,
        "masked loss": row["loss"] == "masked",
        "bfloat16": "bfloat16" in options.values(),
        "frozen": "trainable" in row,
        "NaN": bool(row["nan_at"]),
        "trip": "trip" in row,
        f"trip by {row.get('trip', {}).get('kind')}": "trip" in row,
        f"loss: {row.get('form')}": "form" in row,
        "loss: of a module": bool(row.get("by_model")),
        f"loss: {row['loss']}": "found" in row,
        f"sown: {fields.get('sown')}": bool(fields.get("sown")),
        f"skipped by: {fields.get('drop')}": bool(fields.get("drop")),
        f"qwix: {row.get('rules', {}).get('kind')}": "rules" in row,
        "threads": "threads" in row,
        "elastic": "elastic" in row,
    }
    named = [f"model {row['model']}", row["strategy"], f"mode {row['mode']}", f"tx {row['tx']}"]
    return [*named, *(name for name, is_so in has.items() if is_so)]
