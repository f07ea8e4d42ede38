"""The compiler's messages about memory, as libtpu 0.0.42 writes them."""

from pathlib import Path

import pytest

from manualpar.planner.compiled_plan import read_out_of_memory

GIB = 2**30
MESSAGE = Path(__file__).parent / "tpu" / "out_of_memory.txt"
SEEN_BEFORE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(29.86G) exceeds available HBM (15.75G)."
)


def test_what_is_placed_is_named_the_largest_first() -> None:
    found = read_out_of_memory(MESSAGE.read_text(encoding="utf-8"))
    assert (found.needed, found.available) == (15 * GIB, 15 * GIB)
    assert found.sentences[:3] == (
        "Does not fit: a chip needs 15.00 GiB and has 15.00 GiB, which is 689 KiB too little.",
        "6.25 GiB are f32[40960,40960] of gamma (forward: dot_general).",
        "6.25 GiB are f32[40960,40960] (Argument 0 index {}).",
    )
    assert len(found.sentences) == 6  # Of nine buffers.
    sizes = [float(sentence.partition(" GiB")[0]) for sentence in found.sentences[1:]]
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_seen_before_has_no_parts() -> None:
    found = read_out_of_memory(SEEN_BEFORE)
    assert found.needed == pytest.approx(29.86 * GIB, rel=1e-9)
    assert found.available == 15.75 * GIB
    first, second = found.sentences
    assert first.startswith("Does not fit: a chip needs 29.86 GiB and has 15.75 GiB, which is")
    assert "names none of them" in second


@pytest.mark.parametrize(
    ("number", "size"), [("0B", 0), ("160.0K", 163840), ("2.50M", 2621440), ("4.00P", 2**52)]
)
def test_units(number: str, size: int) -> None:
    message = f"the total memory required for HLO temporaries ({number}) exceeds available HBM (1G)"
    assert read_out_of_memory(message).needed == size


def test_another_message_is_handed_on() -> None:
    found = read_out_of_memory("RESOURCE_EXHAUSTED: something\nelse")
    assert found.needed == found.available == 0
    assert found.sentences == (
        "Does not fit. The compiler reports: RESOURCE_EXHAUSTED: something else",
    )


def test_buffer_of_a_layer_names_its_module_and_its_phase() -> None:
    scope = "jit(train)/shard_map/transpose(jvp(Transformer))/layers/mlp/gate/dot_general"
    buffer = f"""
  1. Size: 1.00G
     Operator: op_name="{scope}"
     Shape: f32[8,16]{{1,0}}
     XLA label: fusion.1 = fusion(a)
"""
    sentences = read_out_of_memory(SEEN_BEFORE + buffer).sentences
    assert sentences[1] == "1.00 GiB are f32[8,16] of layers/mlp/gate (backward: dot_general)."
