"""What a pack was made of, and whether the checkpoint still is that."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hotexperts.errors import CheckpointError
from hotexperts.plain_file import plain

MOST_HEADER_BYTES = 1 << 28
MAKE_AGAIN = "make it again with `hotexperts pack`"


class SourceFile(NamedTuple):
    """What a checkpoint file was when it was packed.

    Attributes:
        name: without its folder.
        nbytes: its size.
        mtime_ns: when it was last written.
        header_sha256: of its safetensors header, in hexadecimal.
    """

    name: str
    nbytes: int
    mtime_ns: int
    header_sha256: str

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """What a file is now.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            with plain(path).open("rb") as file:
                prefix = file.read(8)
                header = file.read(min(int.from_bytes(prefix, "little"), MOST_HEADER_BYTES))
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error}): download it again") from error
        digest = hashlib.sha256(prefix + header).hexdigest()
        return cls(path.name, status.st_size, status.st_mtime_ns, digest)


def check_sources(path: Path, sources: Sequence[SourceFile], files: Sequence[Path]) -> None:
    """Refuse a pack of another state of the checkpoint.

    Args:
        path: the pack's, for the message.
        sources: what the checkpoint's files were.
        files: them now.

    Raises:
        CheckpointError: a file came, went or changed since it was packed.
    """
    now = {file.name: SourceFile.of(file) for file in files}
    then = {source.name: source for source in sources}
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            raise CheckpointError(
                f"{path}: the checkpoint changed since it was packed: {name} "
                f"{_difference(then.get(name), now.get(name))}: {MAKE_AGAIN}"
            )


def check_quantisation(path: Path, then: str | None, now: str | None) -> None:
    """Refuse a pack whose rows were made from bytes that are read otherwise now.

    Args:
        path: the pack's, for the message.
        then: a digest, as `PackHeader.quantisation` has it.
        now: of the checkpoint.

    Raises:
        CheckpointError: it is another one, or an earlier version of ours did not write it down.
    """
    if then == now:
        return
    if then is None:
        raise CheckpointError(
            f"{path}: does not say by which quantization_config its rows were read, as packs "
            f"of an earlier version, or the checkpoint had none then: {MAKE_AGAIN}"
        )
    raise CheckpointError(
        f"{path}: the checkpoint changed since it was packed: config.json has "
        f"{'no' if now is None else 'another'} quantization_config: {MAKE_AGAIN}"
    )


def _difference(then: SourceFile | None, now: SourceFile | None) -> str:
    if then is None or now is None:
        return "is new" if then is None else "is gone"
    if now.nbytes != then.nbytes:
        return f"had {then.nbytes} bytes, has {now.nbytes}"
    if now.header_sha256 != then.header_sha256:
        return "has another header"
    return "was written to"
