"""Choose the UCX lanes of this machine. Nothing here may come from the caller's environment.

NIXL counts the NVIDIA GPUs that the PCI bus shows, and where it finds one it makes no agent unless `UCX_TLS` has a lane
with CUDA memory support, whether or not that memory is ever used. So the lanes are chosen by the same look. A GPU
without a driver (a pod on a GPU node that was given no GPU) is no obstacle: UCX then leaves `cuda_copy` out by itself.
"""

from __future__ import annotations

from pathlib import Path

HOST_LANES = "tcp,cma,self"
CUDA_HOST_LANES = f"{HOST_LANES},cuda_copy"
PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
# The PCI class of a display controller is 0x03ssii: VGA controllers and 3D controllers among others.
_DISPLAY = "0x03"


def count_nvidia_gpus(devices: Path = PCI_DEVICES) -> int:
    """Return the number of NVIDIA display controllers below `devices`; 0 where there is no PCI bus to look at."""
    try:
        return sum(_is_nvidia_gpu(device) for device in devices.iterdir())
    except OSError:
        return 0


def choose_lanes(nvidia_gpus: int) -> str:
    """Return the value of `UCX_TLS` for records in host memory."""
    return CUDA_HOST_LANES if nvidia_gpus else HOST_LANES


def _is_nvidia_gpu(device: Path) -> bool:
    try:
        vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
    except OSError:
        return False  # It was unplugged meanwhile, or is no device.
    return vendor.strip().lower() == _NVIDIA and kind.strip().lower().startswith(_DISPLAY)
