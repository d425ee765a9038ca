"""The lanes follow from what the PCI bus shows, because that is what NIXL decides by."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sidecar_double import Memory
from transfer_double import KEY

from sluice_engine.transfer.lanes import CUDA_HOST_LANES, HOST_LANES, choose_lanes, count_nvidia_gpus
from sluice_engine.transfer.spec import MemorySpec, SidecarSpec, write_spec


def add_device(bus: Path, address: str, vendor: str, kind: str) -> None:
    (bus / address).mkdir(parents=True)
    (bus / address / "vendor").write_text(vendor + "\n")
    (bus / address / "class").write_text(kind + "\n")


def test_display_controllers_of_nvidia_are_counted_and_nothing_else_is(tmp_path: Path) -> None:
    add_device(tmp_path, "0000:00:00.0", "0x8086", "0x060000")
    add_device(tmp_path, "0000:01:00.0", "0x10de", "0x030200")
    add_device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # the audio function of a graphics card
    add_device(tmp_path, "0000:02:00.0", "0x10de", "0x030000")
    add_device(tmp_path, "0000:03:00.0", "0x1002", "0x030000")
    (tmp_path / "0000:04:00.0").mkdir()  # unplugged between the listing and the look
    assert count_nvidia_gpus(tmp_path) == 2


def test_a_machine_without_a_pci_bus_has_no_gpu(tmp_path: Path) -> None:
    assert count_nvidia_gpus(tmp_path / "nowhere") == 0


def test_a_gpu_adds_the_lane_that_nixl_asks_for() -> None:
    assert choose_lanes(0) == HOST_LANES == "tcp,cma,self"
    assert choose_lanes(8) == CUDA_HOST_LANES == "tcp,cma,self,cuda_copy"


@pytest.mark.process
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_sidecar_starts_whatever_the_pci_bus_shows(tmp_path: Path, gpus: int) -> None:
    """In a mount namespace of its own, whose PCI bus is ours: NIXL refuses lanes without CUDA where it sees a GPU."""
    bus = tmp_path / "devices"
    bus.mkdir()
    for number in range(gpus):
        add_device(bus, f"0000:0{number}:00.0", "0x10de", "0x030200")
    unshare = shutil.which("unshare")
    assert unshare is not None, "this test needs unshare of util-linux, which every Linux distribution installs"
    memory = Memory()
    spec = write_spec(SidecarSpec(MemorySpec.of(memory.layouts, memory.plan), "s.1", KEY, one_host=True))
    sidecar = [sys.executable, "-m", "sluice_engine.transfer.sidecar", "--spec-fd", str(spec)]
    sidecar += ["--memory-fd", str(memory.fd), "--socket", str(tmp_path / "s")]
    flags = "-m" if os.geteuid() == 0 else "-rm"
    script = 'mount --bind "$1" /sys/bus/pci/devices && shift && exec "$@"'
    process = subprocess.Popen(
        [unshare, flags, "sh", "-c", script, "sh", str(bus), *sidecar],
        pass_fds=(spec, memory.fd),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(spec)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        told = json.loads(line)
        assert told["event"] == "ready", told
        assert told["lanes"] == (CUDA_HOST_LANES if gpus else HOST_LANES)
        assert (told["lane"], told["warning"]) == ("cma", "")
    finally:
        process.kill()
        process.communicate(timeout=20)
        memory.close()
