"""The published speeds with which the planner's estimates are compared, see `published_figures`.

The rows are ordered by chip. `calibration` chooses the rows to which it fits.
"""

from typing import Any

from benchmarks.published_figures import OthersLayout, PublishedFigure
from manualpar.planner.topology import parse_topology

META = "https://arxiv.org/abs/2407.21783, table 4"
MAXTEXT = (
    "https://github.com/AI-Hypercomputer/maxtext/blob/30cd40a5c8ed02519ddb77682e3ca72b8724f927/"
)
V5E = f"{MAXTEXT}MaxText/configs/v5e/README.md"
V5P = f"{MAXTEXT}MaxText/configs/v5p/README.md"
LLAMA_2 = f"{MAXTEXT}getting_started/Run_Llama2.md"
RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes, training/trillium/"
TORCHTITAN = (
    "https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/"
    "benchmarks/llama3_h100_202412_torchtitan.md"
)
TORCHTITAN_A100 = (
    "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/"
    "docs/performance.md"
)
DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd91f9be958fed4773ae95d941a3356a82/"
A3ULTRA = (
    "https://github.com/AI-Hypercomputer/gpu-recipes/blob/0355c3883fa44a8674e833770d35c18c9374cefb/"
    "training/a3ultra/llama3-1-70b/maxtext-pretraining-gke/README.md"
)


def _maxtext(
    model: str,
    topology: str,
    layout: OthersLayout,
    batch: int,
    mfu: float,
    *,
    source: str,
    positions: int = 2048,
    remark: str = "",
) -> PublishedFigure:
    """Makes a row from an MFU in MaxText's tables; `batch` is the sequences per device."""
    return PublishedFigure(
        whose="MaxText",
        model=model,
        topology=topology,
        layout=layout,
        positions=positions,
        examples=batch * layout.num_devices,
        mfu=mfu,
        source=source,
        remark=remark,
    )


def _recipe(
    model: str,
    topology: str,
    batch: int,
    tokens: float,
    name: str,
    *,
    remat: str = "in kept",
    positions: int = 8192,
    remark: str = "",
) -> PublishedFigure:
    """Makes a row from a speed in Google's recipes for v6e, which use FSDP over all devices."""
    devices = parse_topology(topology).num_devices
    return PublishedFigure(
        whose="MaxText",
        model=model,
        topology=topology,
        layout=OthersLayout(data=devices, remat=remat),
        positions=positions,
        examples=batch * devices,
        tokens_per_second=tokens,
        source=f"{RECIPES}{name}/README.md",
        remark=remark or "what is not computed again is kept on the host",
    )


def _a100(model: str, batch: int, tokens: float, remat: str, positions: int) -> PublishedFigure:
    return PublishedFigure(
        whose="torchtitan",
        model=model,
        topology="a100:64",
        layout=OthersLayout(data=64, remat=remat),
        positions=positions,
        examples=batch * 64,
        tokens_per_second=tokens,
        source=TORCHTITAN_A100,
        remark="the network between nodes is not in the source",
    )


def _nvidia(
    model: str,
    layout: OthersLayout,
    seconds: float,
    examples: int,
    source: str,
    *,
    positions: int = 8192,
    remark: str = "",
) -> PublishedFigure:
    """Makes a row from the seconds of a step in NVIDIA's tables for DGX H100."""
    return PublishedFigure(
        whose="NVIDIA",
        model=model,
        topology=f"h100:{layout.num_devices}",
        layout=layout,
        positions=positions,
        examples=examples,
        tokens_per_second=examples * positions / seconds / layout.num_devices,
        source=f"{DGXC}{source}",
        remark=remark,
    )


def _meta(data: int, mfu: float, *, context: int = 1, remark: str = "") -> PublishedFigure:
    """Makes a row from an MFU of Meta's 405B: microbatches of one sequence, no recomputation."""
    minibatches = 2048 // data if context == 1 else 16
    layout = OthersLayout(
        stage=16,
        data=data,
        context=context,
        model=8,
        num_minibatches=minibatches,
        chunks=8,
        communicate="step",
        remat="none",
    )
    return PublishedFigure(
        whose="Meta",
        model="llama3_405b",
        topology=f"h100:{layout.num_devices}",
        layout=layout,
        positions=8192 if context == 1 else 131_072,
        examples=data * minibatches,
        mfu=mfu,
        source=META,
        remark="chunks of one layer are assumed, and 8 layers in every stage" + remark,
    )


P = OthersLayout
_MEGATRON: dict[str, Any] = {"communicate": "step", "remat": "none"}
_NEMO_8B: dict[str, Any] = {"context": 2, "num_minibatches": 32, **_MEGATRON}
_NEMO_70B: dict[str, Any] = {
    "stage": 4,
    "context": 2,
    "model": 4,
    "num_minibatches": 64,
    "chunks": 5,
    **_MEGATRON,
}
_NEMO_405B: dict[str, Any] = {
    "stage": 9,
    "context": 2,
    "model": 8,
    "num_minibatches": 63,
    "chunks": 7,
    **_MEGATRON,
}
_GPT2 = "the vocabulary is GPT-2's there, which makes the head smaller"
_QKV = "queries, keys and values are kept on the host there"
_HALF = "every other product"

FIGURES = (
    _maxtext("maxtext_16b", "v5e:16x16", P(data=256), 6, 0.6110, source=V5E),
    _maxtext("maxtext_16b", "32xv5e:16x16", P(replica=32, data=256), 6, 0.5465, source=V5E),
    _maxtext("maxtext_32b", "v5e:16x16", P(data=256), 4, 0.6686, source=V5E),
    _maxtext("maxtext_32b", "32xv5e:16x16", P(replica=32, data=256), 4, 0.6040, source=V5E),
    _maxtext("maxtext_64b", "v5e:16x16", P(data=256), 2, 0.5990, source=V5E),
    _maxtext("maxtext_64b", "32xv5e:16x16", P(replica=32, data=256), 2, 0.5018, source=V5E),
    _maxtext(
        "maxtext_128b", "v5e:16x16", P(data=16, model=16, remat="dots"), 1, 0.5606, source=V5E
    ),
    _maxtext(
        "maxtext_128b",
        "32xv5e:16x16",
        P(replica=32, data=16, model=16, remat="dots"),
        1,
        0.4625,
        source=V5E,
    ),
    _maxtext(
        "llama2_70b",
        "v5e:16x16",
        P(data=256, remat="in kept"),
        2,
        0.57,
        source=LLAMA_2,
        remark=f"{_QKV}; the length is the default",
    ),
    _maxtext("maxtext_32b", "v5p:4x4x4", P(data=16, model=4, remat="dots"), 7, 0.7147, source=V5P),
    _maxtext(
        "maxtext_32b",
        "2xv5p:4x4x4",
        P(replica=2, data=16, model=4, remat="dots"),
        7,
        0.6943,
        source=V5P,
    ),
    _maxtext("maxtext_64b", "v5p:4x4x4", P(data=16, model=4, remat="dots"), 3, 0.7031, source=V5P),
    _maxtext(
        "maxtext_64b",
        "2xv5p:4x4x4",
        P(replica=2, data=16, model=4, remat="dots"),
        3,
        0.6726,
        source=V5P,
    ),
    _maxtext("maxtext_128b", "v5p:4x4x8", P(data=16, model=8, remat="dots"), 1, 0.6868, source=V5P),
    _maxtext(
        "maxtext_128b",
        "2xv5p:4x8x8",
        P(replica=2, data=32, model=8, remat="dots"),
        1,
        0.5966,
        source=V5P,
    ),
    _maxtext("maxtext_256b", "v5p:8x8x8", P(data=64, model=8, remat="dots"), 1, 0.6709, source=V5P),
    _maxtext(
        "maxtext_256b",
        "2xv5p:8x8x8",
        P(replica=2, data=64, model=8, remat="dots"),
        1,
        0.6299,
        source=V5P,
    ),
    _maxtext("maxtext_512b", "v5p:8x8x8", P(data=64, model=8), 2, 0.6399, source=V5P),
    _maxtext("maxtext_512b", "2xv5p:8x8x8", P(replica=2, data=64, model=8), 2, 0.6145, source=V5P),
    _maxtext("maxtext_1024b", "v5p:8x8x16", P(data=64, model=16), 2, 0.5535, source=V5P),
    _maxtext(
        "maxtext_1024b", "2xv5p:8x16x16", P(replica=2, data=128, model=16), 2, 0.6083, source=V5P
    ),
    _maxtext(
        "llama2_70b",
        "v5p:4x4x4",
        P(data=64, remat="in, out kept"),
        4,
        0.65,
        positions=4096,
        source=LLAMA_2,
        remark="v5p-128; batch: MaxText/configs/v5p/llama2_70b.sh",
    ),
    _recipe("llama3_8b", "v6e:2x4", 3, 7138.890, "Llama3.1-8B-MaxText/v6e-8", remat="in, out kept"),
    _recipe(
        "llama3_8b", "v6e:8x8", 5, 7247.111, "Llama3.1-8B-MaxText/v6e-64", remat="in, out kept"
    ),
    _recipe(
        "llama3_8b", "v6e:16x16", 4, 7207.336, "Llama3.1-8B-MaxText/v6e-256", remat="in, out kept"
    ),
    _recipe("llama3_70b", "v6e:8x8", 2, 876.736, "Llama3.1-70B-MaxText/v6e-64"),
    _recipe("llama3_70b", "v6e:8x16", 4, 941.976, "Llama3.1-70B-MaxText/v6e-128"),
    _recipe("llama3_70b", "v6e:16x16", 5, 960.248, "Llama3.1-70B-MaxText/v6e-256"),
    _recipe("llama3_405b", "2xv6e:16x16", 1, 149.482, "Llama3.1-405B-MaxText", remat="full"),
    _recipe("llama2_70b", "v6e:16x16", 4, 943.086, "Llama2-70B-MaxText", positions=4096),
    _recipe("mistral_7b", "v6e:2x4", 6, 7776.813, "Mistral-7B-MaxText", remat="in, out kept"),
    _recipe(
        "mixtral_8x7b",
        "v6e:16x16",
        12,
        3645.203,
        "Mixtral-8x7B-MaxText",
        remat="in, out kept",
        positions=4096,
    ),
    _recipe(
        "mixtral_8x22b",
        "v6e:16x16",
        8,
        1326.307,
        "Mixtral-8x22B-MaxText",
        remat="full",
        positions=4096,
        remark="that all is computed again is assumed",
    ),
    _a100("llama3_8b", 1, 2904, "every other layer", 8192),
    _a100("llama3_8b", 1, 2973, _HALF, 8192),
    _a100("llama3_70b", 1, 331, "full", 8192),
    _a100("llama2_13b", 2, 2162, "none", 4096),
    _a100("llama2_13b", 2, 1914, "every other layer", 4096),
    _a100("llama2_13b", 2, 1904, _HALF, 4096),
    _a100("llama2_70b", 1, 355, _HALF, 4096),
    _a100("llama2_70b", 2, 353, "full", 4096),
    _nvidia("llama3_8b", P(data=4, **_NEMO_8B), 12.91, 128, "llama3.1/README_8b.md"),
    _nvidia("llama3_8b", P(data=64, **_NEMO_8B), 13.10, 2048, "llama3.1/README_8b.md"),
    _nvidia("llama3_70b", P(data=2, **_NEMO_70B), 14.72, 128, "llama3.1/README_70b.md"),
    _nvidia("llama3_70b", P(data=64, **_NEMO_70B), 14.98, 4096, "llama3.1/README_70b.md"),
    _nvidia(
        "llama3_405b", P(data=4, **_NEMO_405B), 17.20, 252, "llama3.1/README_405b.md", remark=_GPT2
    ),
    _nvidia(
        "llama3_405b",
        P(data=16, **_NEMO_405B),
        17.62,
        1008,
        "llama3.1/README_405b.md",
        remark=_GPT2,
    ),
    _nvidia(
        "llama2_70b",
        P(data=64, remat="in kept"),
        6.999,
        128,
        "maxtext/README_70b.md",
        positions=4096,
    ),
    _nvidia(
        "llama2_70b",
        P(replica=16, data=128, remat="in kept"),
        7.066,
        4096,
        "maxtext/README_70b.md",
        positions=4096,
    ),
    PublishedFigure(
        whose="Google",
        model="llama3_70b",
        topology="h200:256",
        layout=P(replica=2, data=128, remat="in, out kept"),
        positions=8192,
        examples=512,
        tokens_per_second=1055.949,
        source=A3ULTRA,
    ),
    _meta(64, 0.43),
    _meta(128, 0.41),
    _meta(8, 0.38, context=16, remark="; keys and values are gathered there, in a ring here"),
    PublishedFigure(
        whose="torchtitan",
        model="llama3_8b",
        topology="h100-500w:8",
        layout=P(data=8, remat=_HALF),
        positions=8192,
        examples=16,
        tokens_per_second=6667,
        source=f"{TORCHTITAN}, table 1, compiled, bfloat16",
    ),
    PublishedFigure(
        whose="torchtitan",
        model="llama3_8b",
        topology="h100-500w:128",
        layout=P(data=128, remat=_HALF),
        positions=8192,
        examples=256,
        tokens_per_second=6514,
        source=f"{TORCHTITAN}, table 3, compiled, bfloat16",
    ),
    PublishedFigure(
        whose="DeepSeek",
        model="deepseek_v3",
        topology="h100:2048",
        layout=P(
            stage=16, data=2, expert=64, num_minibatches=120, communicate="step", remat="dots"
        ),
        positions=4096,
        examples=15_360,
        tokens_per_second=1e12 / (180e3 * 3600),
        source="https://arxiv.org/abs/2412.19437, 180 thousand GPU hours for 10^12 tokens",
        dtype="float8",
        remark="H800s and a schedule of its own there; bfloat16, H100s and 1F1B here",
    ),
)
