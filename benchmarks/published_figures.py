"""What other systems have published of training Llamas, and the planner's estimate for that shape.

A figure is compared with what the roofline says of a program of this package with the model's
shapes, batch and number of devices, once with all products kept for the backward pass ("dots") and
once with all of a layer computed again ("full"), between which the systems' own policies lie. Their
kernels and compilers are not modelled, but for attention, which is taken as one fused kernel as all
of these have. No constant was fitted to these figures; but after the first comparison (ratios of
1.21 to 1.72 then) the roofline was given a term that it lacked, for what elementwise operations
read and write, and both settings of remat are shown since.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from manualpar import Batch, abstract_mesh, fsdp
from manualpar.models import Transformer
from manualpar.models.transformer import flops_per_token
from manualpar.planner.plan import Plan
from manualpar.planner.roofline import estimate
from manualpar.planner.step_work import read_work
from manualpar.planner.topology import parse_topology
from manualpar.training.cross_entropy import language_model_loss
from manualpar.training.optimizer import adamw
from manualpar.watching.throughput import Throughput

# Touvron et al., https://arxiv.org/abs/2307.09288, and Grattafiori et al.,
# https://arxiv.org/abs/2407.21783, table 3.
LLAMA_2_70B = {
    "vocab_size": 32_000,
    "num_layers": 80,
    "hidden_size": 8192,
    "num_heads": 64,
    "num_kv_heads": 8,
    "mlp_size": 28_672,
}
LLAMA_3_8B = {
    "vocab_size": 128_256,
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "mlp_size": 14_336,
}
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/"
TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/"
    "benchmarks/llama3_h100_202412_torchtitan.md"
)


@dataclasses.dataclass(frozen=True)
class Published:
    """A published figure.

    Attributes:
      system: Whose it is.
      model: The model's name.
      shape: Its fields, those of `Transformer`.
      topology: On what, as `parse_topology` takes it.
      sequence_length: Positions.
      examples_per_device: Sequences a device and step.
      mfu: The published MFU; `None` if there is none.
      tokens_per_second: Of a device, likewise.
      memory_gib: Of a device, likewise.
      source: Where it stands.
      remark: What differs, or was assumed.
    """

    system: str
    model: str
    shape: Mapping[str, int]
    topology: str
    sequence_length: int
    examples_per_device: int
    mfu: float | None
    tokens_per_second: float | None
    memory_gib: float | None
    source: str
    remark: str


FIGURES = (
    Published(
        system="MaxText",
        model="Llama 2 70B",
        shape=LLAMA_2_70B,
        topology="v5p:4x4x4",
        sequence_length=4096,
        examples_per_device=4,
        mfu=0.65,
        tokens_per_second=None,
        memory_gib=None,
        source=MAXTEXT + "8c3d2e65aa05446ce6674ea40ce7814be14a02ad/getting_started/Run_Llama2.md "
        "(v5p-128, 64 chips: 65%); shape and batch: benchmarks/maxtext_v5p_model_configs.py, "
        "llama2_70b_v5p_128",
        remark="Its remat keeps all products but the MLP's first two",
    ),
    Published(
        system="MaxText",
        model="Llama 2 70B",
        shape=LLAMA_2_70B,
        topology="v5e:16x16",
        sequence_length=2048,
        examples_per_device=2,
        mfu=0.57,
        tokens_per_second=None,
        memory_gib=None,
        source=MAXTEXT + "8c3d2e65aa05446ce6674ea40ce7814be14a02ad/getting_started/Run_Llama2.md "
        "(v5e-256: 57%); batch: MaxText/configs/v5e/llama2_70b.sh",
        remark="Its remat moves queries, keys and values to the host; the sequence length is its "
        "default",
    ),
    Published(
        system="MaxText",
        model="Llama 2 70B",
        shape=LLAMA_2_70B,
        topology="v6e:16x16",
        sequence_length=4096,
        examples_per_device=4,
        mfu=419.193 / 918,
        tokens_per_second=943.086,
        memory_gib=None,
        source="https://github.com/AI-Hypercomputer/tpu-recipes, "
        "training/trillium/Llama2-70B-MaxText/README.md (419.193 TFLOP/s and 943.086 tokens/s a "
        "device, 4,194,304 tokens a step)",
        remark="Its remat policy is not in the source",
    ),
    Published(
        system="torchtitan, torch.compile",
        model="Llama 3.1 8B",
        shape=LLAMA_3_8B,
        topology="h100:8",
        sequence_length=8192,
        examples_per_device=2,
        mfu=0.39,
        tokens_per_second=6667,
        memory_gib=77.0,
        source=f"{TORCHTITAN} table 1 (6,667 compiled, 5,762 not; MFU 33% to 39%)",
        remark="H100s of 500 W with HBM2e of 2.4 TB/s and 96 GB, slower than the SXM in the table "
        "of chips; selective checkpointing",
    ),
    Published(
        system="torchtitan, torch.compile",
        model="Llama 3.1 8B",
        shape=LLAMA_3_8B,
        topology="h100:128",
        sequence_length=8192,
        examples_per_device=2,
        mfu=0.39,
        tokens_per_second=6514,
        memory_gib=62.0,
        source=f"{TORCHTITAN} table 3 (6,514 compiled, 5,605 not)",
        remark="As above",
    ),
)


def plan_figure(figure: Published, *, remat: str) -> Plan:
    """The roofline's plan for a published shape: parameters in float32, gathered in bfloat16.

    Args:
      figure: The figure.
      remat: What is computed again, as `Transformer` takes it.

    Returns:
      The plan.
    """
    topology = parse_topology(figure.topology)
    count, length = topology.num_devices, figure.sequence_length
    shape: dict[str, Any] = {**figure.shape}
    model = Transformer(**shape, dtype="bfloat16", remat=remat, scan_layers=True)
    tokens = jax.ShapeDtypeStruct((figure.examples_per_device * count, length), jnp.int32)
    program = fsdp(
        model,
        adamw(1e-4, weight_decay=0.1, b1=0.9, b2=0.95, clip_norm=1.0),
        language_model_loss,
        mesh=abstract_mesh({"data": count}, count),
        batch=Batch(inputs=tokens, labels=tokens),
        gather_dtype="bfloat16",
        reduce_dtype="float32",
    )
    flops = flops_per_token(model, length) * length
    throughput = Throughput(figure.examples_per_device * count, length, flops)
    return estimate(read_work(program, throughput, fused_attention=True), topology)
