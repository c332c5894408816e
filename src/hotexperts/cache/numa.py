"""Memory on the GPU's own NUMA node, where the system has several and says which."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import torch

_MBIND = {"x86_64": 237, "aarch64": 235}  # the system call's number
_PREFERRED = 1  # MPOL_PREFERRED: a full node lends from others, where binding would end the process
_MOST_NODES = 1024


def node_of_current_gpu(root: Path = Path("/")) -> int | None:
    """The node of the current CUDA device; None with one node, or where nobody knows."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return node_of(place, root)


def node_of(place: tuple[int, int, int], root: Path = Path("/")) -> int | None:
    """The node of a PCI device, given as domain, bus and device; see `node_of_current_gpu`."""
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    domain, bus, device = place
    name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    try:
        node = int((root / "sys/bus/pci/devices" / name / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < _MOST_NODES else None


def prefer(node: int, address: int, nbytes: int) -> bool:
    """Ask that pages not touched yet come from a node; False where the system does not do that.

    Args:
        node: its number.
        address: a multiple of the page size.
        nbytes: from there.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    bits = ctypes.c_uint64 * (_MOST_NODES // 64)
    mask = bits()
    mask[node // 64] = 1 << node % 64
    arguments = (address, nbytes, _PREFERRED, ctypes.addressof(mask), _MOST_NODES + 1, 0)
    return ctypes.CDLL(None).syscall(number, *map(ctypes.c_ulong, arguments)) == 0
