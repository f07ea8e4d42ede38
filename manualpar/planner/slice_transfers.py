"""Reads the transfers between slices in a program that XLA compiled for several slices of TPUs.

XLA divides a collective that crosses slices into collectives within each slice and transfers
between slices. The compiled program is that of one slice. In it a transfer is a pair of a `send`
and a `recv`, by which a chip hands an array to its host and takes the result. The hosts run the
collective over the data center's network. The pair has the same rendezvous and names the chips of
each group: `"{1,2}x{0:3}"` groups each of the chips 0 to 3 of slice 1 with the same chip of slice
2, and `{{100000,200000},...}` lists the groups, a chip as its slice times 100,000 plus its number.
"""

import re

from manualpar.inspect.communication import Kind
from manualpar.inspect.hlo import Groups, Instruction

HANDLER = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
KIND_OF_TRANSFER: dict[str, Kind] = {
    "ALL_GATHER": "all_gather",
    "ALL_REDUCE": "all_reduce",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
    "REDUCE_SCATTER": "reduce_scatter",
}
SLICE = 100_000  # The number of a chip is its slice, counted from 1, times this, plus its number.


def is_between_slices(instruction: Instruction) -> bool:
    """Returns whether an instruction starts or ends a transfer between slices."""
    return HANDLER in instruction.attributes


def rendezvous_of(instruction: Instruction) -> str:
    """Returns the name that the `send` and the `recv` of a transfer share."""
    return instruction.found(r'_xla_host_transfer_rendezvous="([^"]*)"')


def kind_of_transfer(send: Instruction) -> Kind:
    """Returns the kind of the collective that the hosts run.

    Raises:
      ValueError: The kind is not known here, so neither are its bytes.
    """
    name = send.found(r'_xla_megascale_transfer_type="(\w*)"')
    if name not in KIND_OF_TRANSFER:
        raise ValueError(
            f"read_timeline: {send.name} is a transfer between slices of type {name!r}, expected "
            f"one of {', '.join(KIND_OF_TRANSFER)}: the bytes of other types are unknown. Teach "
            "manualpar/planner/slice_transfers.py the type."
        )
    return KIND_OF_TRANSFER[name]


def slice_groups(send: Instruction, chips_per_slice: int) -> Groups:
    """Returns the groups of devices of a transfer, by their places on a mesh of all slices.

    The slices are the major part of the mesh. Only which slices a group has is exact: chips of one
    slice may be in another order on the mesh.

    Raises:
      ValueError: The groups are written in a form that this function cannot parse.
    """
    target = send.attribute("_xla_megascale_target").partition("_xla_")[0]
    if square := re.match(r'"\{([\d,]+)\}x', target):
        slices = [int(number) - 1 for number in square[1].split(",")]
        chips = range(chips_per_slice)
        return tuple(tuple(s * chips_per_slice + chip for s in slices) for chip in chips)
    groups = tuple(
        tuple(
            (int(number) // SLICE - 1) * chips_per_slice + int(number) % SLICE
            for number in re.split(",|->", group)
        )
        for group in re.findall(r"\{(\d+(?:(?:,|->)\d+)*)\}", target)
    )
    if not groups:
        raise ValueError(
            f"read_timeline: {send.name} has the target {target[:60]}, expected "
            '"{1,2}x{0:3}" or {{100000,200000}}. Teach manualpar/planner/slice_transfers.py the '
            "form."
        )
    return groups
