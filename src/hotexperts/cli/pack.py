"""`hotexperts pack`: a checkpoint's experts into one file, once, for `--expert-store disk`."""

from __future__ import annotations

import typer

from hotexperts.cli import console, options
from hotexperts.config import format_bytes


def pack(
    model: options.Model = None,
    expert_pack: options.ExpertPack = None,
    dtype: options.WeightsDtype = options.Dtype.AUTO,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
    debug: options.Debug = False,
) -> None:
    """Write all experts of a checkpoint to one file, for --expert-store disk.

    The file has their rows as they are computed with, with a checksum each. It takes as much disk
    as the experts; what does not fit is refused before it begins. After Ctrl-C the next call goes
    on where this one stopped; a pack that is there already and has no damaged row is kept.
    """
    with console.errors_as_one_line(debug):
        path = options.model_path(model)

        from hotexperts.transformers import pack as write

        with console.loading("packing experts") as progress:
            done = write(
                path,
                expert_pack=expert_pack,
                dtype=dtype.value,
                progress=progress,
                trust_remote_code=trust_remote_code,
            )
    if as_json:
        console.show_json(
            {
                "path": str(done.path),
                "nbytes": done.nbytes,
                "num_experts": done.num_rows,
                "num_written": done.num_written,
            }
        )
        return
    what = f"{done.num_written} of {done.num_rows} experts written" if done.num_written else "kept"
    typer.echo(f"{done.path}: {what}, {format_bytes(done.nbytes)}")
