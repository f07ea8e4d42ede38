"""Published speeds of training large transformers, and how they are made comparable.

`published_rows` has the rows, one for each published step. A row is included if its source gives
all that an estimate needs: shape, devices, layout, batch, recomputation, and speed. `remark` names
the remaining assumptions. If a source varies only the number of devices, the rows with the fewest
and the most devices are included. If two sources publish the same step, there is one row. A row
whose two figures contradict each other is left out (MaxText's 405B on one v6e-256: an MFU of 38.55%
does not give 123 tokens/s).

If the source has tokens per device and second, these are used, because they need no convention. If
the source has only an MFU, the tokens are computed from it. Publishers count the operations of
attention (queries times keys, and scores times values) by two conventions: "whole", as in PaLM and
this package, or "half", the part that a causal mask leaves. `attention` gives the publisher's
convention, so that the convention does not change the shares that `calibration` fits.

- MaxText (2024): "whole". Its release notes say that it halves attention only since July 2025. The
  rows with both figures confirm this: 449.17 TFLOP/s and 7,756 tokens/s are 57.9 GFLOP a token,
  which is 6 P + 12 L N H S for Llama 3.1 8B (P parameters, L layers, N heads of size H, S
  positions). The matrix products of the head count; the embedding lookup does not. A version of
  early 2024 counted half. If the tables for v5e and v5p come from that version, their MFUs mean 2%
  more tokens, 3% for the model of 16B and 4% for Llama 2 70B on a v5p-128.
- torchtitan: only its tokens/s are used. Its MFU of 39% at 6,667 tokens/s counts attention as
  "whole" too.
- Meta does not state its convention, but cites PaLM for MFU, so "whole" is assumed. With "half"
  there would be 4% fewer operations at 8,192 positions and 29% fewer at 131,072.
- NVIDIA's tables give the seconds of a step. (Their MFU counts attention as "whole" too.)
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from manualpar.models import Context, Transformer
from manualpar.models.flat_fields import nest_fields
from manualpar.models.transformer import flops_per_token
from manualpar.planner.topology import Topology, parse_topology
from manualpar.plans.layouts.layout import Layout

_FIELDS = ("num_layers", "hidden_size", "mlp_size", "num_heads", "num_kv_heads", "vocab_size")


def _shape(*sizes: int, **more: Any) -> dict[str, Any]:
    return dict(zip(_FIELDS, sizes, strict=True)) | more


def _maxtext_shape(scale: int) -> dict[str, Any]:
    """Returns MaxText's shape for `global_parameter_scale`, a power of two in billions."""
    whole, rest = divmod(scale.bit_length() - 1, 3)
    wide = 2 ** (whole + (rest > 0))
    hidden = 2048 * 2 ** (whole + (rest > 1))
    heads = 16 * wide
    return _shape(16 * 2**whole, hidden, 7168 * wide, heads, heads, 32_000, head_size=128)


# The shapes of Llama 2 are from https://arxiv.org/abs/2307.09288, and those of Llama 3 from table 3
# of https://arxiv.org/abs/2407.21783.
# DeepSeek-V3 is approximated as in `configs/plan/deepseek_v3.py`.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama2_13b": _shape(40, 5120, 13_824, 40, 40, 32_000),
    "llama2_70b": _shape(80, 8192, 28_672, 64, 8, 32_000),
    "llama3_8b": _shape(32, 4096, 14_336, 32, 8, 128_256),
    "llama3_70b": _shape(80, 8192, 28_672, 64, 8, 128_256),
    "llama3_405b": _shape(126, 16_384, 53_248, 128, 8, 128_256),
    "mistral_7b": _shape(32, 4096, 14_336, 32, 8, 32_000),
    "mixtral_8x7b": _shape(
        32, 4096, 14_336, 32, 8, 32_000, num_experts=8, experts_per_token=2, capacity_factor=1.25
    ),
    "mixtral_8x22b": _shape(
        56, 6144, 16_384, 48, 8, 32_768, num_experts=8, experts_per_token=2, capacity_factor=1.25
    ),
    "deepseek_v3": _shape(
        61,
        7168,
        2048,
        128,
        128,
        129_280,
        num_experts=256,
        experts_per_token=8,
        capacity_factor=1.25,
    ),
    **{f"maxtext_{scale}b": _maxtext_shape(scale) for scale in (16, 32, 64, 128, 256, 512, 1024)},
}


_EVERYTHING = dict.fromkeys(("norms", "in", "scores", "out", "mlp", "experts"), 1.0)


class OthersLayout(Layout):
    """A layout of another library's program, with other choices of what is recomputed.

    `remats` gives, for each choice, the share of each group of a layer's products that is
    recomputed in the backward pass.
    """

    keeps_logits = True
    remats: ClassVar[Mapping[str, Mapping[str, float]]] = {
        "none": {},
        "dots": {"norms": 1.0, "scores": 1.0, "experts": 1.0},
        "full": _EVERYTHING,
        "in kept": _EVERYTHING | {"in": 0.0},
        "in, out kept": _EVERYTHING | {"in": 0.0, "out": 0.0},
        "every other product": dict.fromkeys(_EVERYTHING, 0.5) | {"norms": 1.0, "scores": 0.0},
        "every other layer": dict.fromkeys(_EVERYTHING, 0.5) | {"norms": 1.0},
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """One published training speed: a row of the table.

    Attributes:
      whose: The publisher.
      model: One of `SHAPES`.
      layout: The layout over all devices of the topology; its `remat` is the recomputation that the
        source reports.
      positions: The number of positions in a sequence.
      examples: The number of sequences in a step.
      tokens_per_second: Tokens per device and second; `None` if only an MFU is published.
      mfu: The published MFU, if no tokens are published.
      attention: How the publisher counts attention's operations in an MFU: "whole" or "half".
      dtype: The dtype of matrix products.
      remark: What the source does otherwise, and what is assumed.
    """

    whose: str
    model: str
    topology: str
    layout: OthersLayout
    positions: int
    examples: int
    source: str
    tokens_per_second: float | None = None
    mfu: float | None = None
    attention: Literal["whole", "half"] = "whole"
    dtype: str = "bfloat16"
    remark: str = ""

    @property
    def name(self) -> str:
        """The publisher, the model and the devices, for a table."""
        return f"{self.whose}, {self.model}, {self.topology}"

    @functools.cached_property
    def transformer(self) -> Transformer:
        """The model, unsharded."""
        shape: dict[str, Any] = {**SHAPES[self.model]}
        # Their split sequences attend in a ring, or gather keys and values.
        ring = Context(how="ring")
        return Transformer(**nest_fields(shape), dtype="bfloat16", scan_layers=True, context=ring)

    @functools.cached_property
    def devices(self) -> Topology:
        """The devices, parsed from `topology`."""
        return parse_topology(self.topology)

    @functools.cached_property
    def speed(self) -> float:
        """Tokens per device and second; computed from the MFU if no tokens are published."""
        if self.tokens_per_second is not None:
            return self.tokens_per_second
        assert self.mfu is not None
        model = self.transformer
        flops = float(flops_per_token(model, self.positions))
        if self.attention == "half":
            flops = (flops + flops_per_token(model, 0)) / 2
        return self.mfu * self.devices.chip.peak(self.dtype) / flops
