"""Safetensors files as stores: zero copies, exact bytes, and faults that name the file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hotexperts.cache import CPUBackingStore, FileStore
from hotexperts.cache.host_memory import HostBuffer, available_host_bytes, require_host_bytes
from hotexperts.cache.safetensors_file import SafetensorsFile
from hotexperts.errors import CheckpointError, HostMemoryError
from hotexperts.formats import ExpertLayout, TensorSpec


def write(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A minimal writer of the format, so that the reader is tested against bytes, not itself."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        offsets = [len(data), len(data) + len(raw)]
        dtype = names[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return write(
        tmp_path / "model.safetensors",
        {
            "odd": torch.arange(3.0).to(torch.float8_e4m3fn),  # shifts what follows by 3 bytes
            "w": torch.arange(24.0).view(4, 3, 2).bfloat16(),
            "none": torch.empty(0, 4),
        },
    )


def test_tensors_are_read_whatever_their_alignment(example: Path) -> None:
    file = SafetensorsFile(example)
    assert torch.equal(file.tensor("w"), torch.arange(24.0).view(4, 3, 2).bfloat16())
    assert file.tensor("odd").float().tolist() == [0, 1, 2]
    assert file.tensor("none").shape == (0, 4)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: has no tensor 'v'"):
        file.tensor("v")


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    source = torch.randn(64, 1024)
    file = SafetensorsFile(write(tmp_path / "m.safetensors", {"w": source}))
    view = file.tensor("w")
    assert torch.equal(view, source)
    file.release("w")
    assert torch.equal(view, source)


def test_a_file_that_is_cut_while_it_is_mapped_is_named(tmp_path: Path) -> None:
    """Before its bytes are touched, which would end the process."""
    path = write(tmp_path / "m.safetensors", {"w": torch.randn(64, 1024)})
    file, size = SafetensorsFile(path), path.stat().st_size
    assert file.tensor("w").shape == (64, 1024)
    os.truncate(path, size - 1)
    message = rf"m\.safetensors: had {size} bytes when it was opened, and has {size - 1}: restore"
    with pytest.raises(CheckpointError, match=message):
        file.tensor("w")
    os.truncate(path, size + 1)  # what is there is all there
    assert file.tensor("w").shape == (64, 1024)


def test_reading_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = {"a": torch.randn(3, 5).half(), "b": torch.randint(0, 9, (7,)), "c": torch.tensor(2.5)}
    save_file(source, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    for name, tensor in source.items():
        assert torch.equal(file.tensor(name), tensor)


@pytest.mark.parametrize("keep", [0, 5, 40, -1, -13])
def test_a_truncated_file_is_named(example: Path, keep: int) -> None:
    content = example.read_bytes()
    example.write_bytes(content[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: (truncated|cannot be read)"):
        SafetensorsFile(example)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "corrupt: tensor 'w'"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}, "cannot be understood"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "corrupt: tensor 'w'"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "cannot be understood"),
        ({"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}, "cannot be understood"),
        ({"shape": [2]}, "cannot be understood"),
        ("text", "cannot be understood"),
    ],
)
def test_a_corrupt_header_is_named(tmp_path: Path, entry: object, message: str) -> None:
    text = json.dumps({"w": entry}).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors: .*{message}"):
        SafetensorsFile(path)


def test_a_header_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    for text in (b"{nonsense", b"[1]", b"\xff\xfe"):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(CheckpointError, match="corrupt header"):
            SafetensorsFile(path)


LAYOUT = ExpertLayout(
    (TensorSpec("w", (4, 2), torch.bfloat16), TensorSpec("scale", (), torch.float32))
)


def make_file_store(released: list[int]) -> FileStore:
    """Expert e has w = two pieces of value e and e + 0.5 in fp32, converted on the way."""

    def read(expert: int) -> list[list[torch.Tensor]]:
        halves = [torch.full((2, 2), expert + half) for half in (0.0, 0.5)]
        return [halves, [torch.tensor([float(expert)])]]

    return FileStore(LAYOUT, 5, read, release=released.append)


def test_a_row_is_assembled_from_pieces_and_converted() -> None:
    released: list[int] = []
    target = [torch.empty(4, 2, dtype=torch.bfloat16), torch.empty(())]
    make_file_store(released).copy_into(3, target)
    assert target[0].tolist() == [[3.0, 3.0], [3.0, 3.0], [3.5, 3.5], [3.5, 3.5]]
    assert target[1].item() == 3.0
    assert released == [3]


def test_pieces_of_a_wrong_shape_are_an_error() -> None:
    store = FileStore(LAYOUT, 2, lambda e: [[torch.zeros(3, 2)], [torch.zeros(1)]])
    with pytest.raises(CheckpointError, match=r"tensor 'w': the file has \[\[3, 2\]\], the model"):
        store.copy_into(0, [torch.empty(4, 2), torch.empty(())])


def test_a_ram_store_is_a_copy_of_a_file_store() -> None:
    steps: list[int] = []
    store = CPUBackingStore.from_store(make_file_store([]), after_each=steps.append)
    assert store.tensors.w[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert store.tensors.scale.tolist() == [0, 1, 2, 3, 4]
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.gpu
def test_a_file_store_reaches_the_gpu_through_page_locked_rows() -> None:
    from hotexperts.cache import CachedWeightProvider
    from hotexperts.cache.file_store import PinnedBounce

    source = make_file_store([])
    bounced = FileStore(LAYOUT, 5, source._read_expert, bounce=PinnedBounce(LAYOUT.row_nbytes))
    provider = CachedWeightProvider(bounced, 3, device="cuda")
    for _ in range(4):
        for wave in provider.waves(torch.arange(5, device="cuda")):
            slots = wave.topk_ids[wave.topk_ids >= 0]
            experts = (wave.topk_ids >= 0).nonzero().flatten()
            assert torch.equal(wave.tensors.scale[slots].long(), experts)


def test_host_memory_has_the_exact_size() -> None:
    buffer = HostBuffer(5 * 2**20 + 7, pin=False)
    assert buffer.bytes.numel() == 5 * 2**20 + 7
    assert buffer.bytes.untyped_storage().nbytes() == 5 * 2**20 + 7
    assert buffer.bytes.data_ptr() % 4096 == 0


def test_memory_that_the_system_refuses_is_a_clear_error() -> None:
    with pytest.raises(HostMemoryError, match="cannot map"):
        HostBuffer(2**62, pin=False)


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_s_idle_files_are_memory_that_is_free(version: int, tmp_path: Path) -> None:
    folder = tmp_path / "memory" if version == 1 else tmp_path
    folder.mkdir(exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
    limit, usage, idle = names.get(version, ("memory.max", "memory.current", "inactive_file"))
    (folder / limit).write_text("1000\n")
    (folder / usage).write_text("900\n")
    assert available_host_bytes(tmp_path) == 100
    (folder / "memory.stat").write_text(f"anon 200\nx{idle} 5\n{idle} 650\n")
    assert available_host_bytes(tmp_path) == 750
    (folder / usage).write_text("1800\n")
    assert available_host_bytes(tmp_path) == 0
    (folder / limit).write_text(f"{1 << 62}\n")
    assert available_host_bytes(tmp_path) > 1 << 20


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_any_cgroup_above_the_process_counts(version: int, tmp_path: Path) -> None:
    """A batch system limits its jobs far below the root of the tree."""
    tree, limit, usage = {
        1: ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("", "memory.max", "memory.current"),
    }[version]
    jobs = tmp_path / tree / "slurm" / "job_7"
    (jobs / "step_0").mkdir(parents=True)
    membership = tmp_path / "membership"
    lines = ["5:cpu:/elsewhere", "4:name=systemd:/", f"0:{tree}:/slurm/job_7/step_0"]
    membership.write_text("\n".join(lines) + "\n")
    for folder, most in ((jobs, 1000), (jobs / "step_0", 1 << 62)):
        (folder / limit).write_text(f"{most}\n")
        (folder / usage).write_text("400\n")
    assert available_host_bytes(tmp_path, membership) == 600
    (jobs / "step_0" / limit).write_text("500\n")
    assert available_host_bytes(tmp_path, membership) == 100
    membership.write_text(f"0:{tree}:/docker/of-the-host\n")  # a container sees its own as the root
    (tmp_path / tree / limit).write_text("900\n")
    (tmp_path / tree / usage).write_text("200\n")
    assert available_host_bytes(tmp_path, membership) == 700
    membership.write_text(f"0:{tree}:/../other\n")
    assert available_host_bytes(tmp_path, membership) == 700


def test_more_than_the_host_has_is_refused_before_the_work() -> None:
    require_host_bytes(1, "nothing")
    with pytest.raises(HostMemoryError, match=r"a model needs .*, .* is available: keep the exp"):
        require_host_bytes(available_host_bytes() * 2, "a model")
