"""The estimate for a reader: a table with a column for each stage, the verdict, and what is not in it."""

from dataclasses import asdict
from textwrap import wrap
from typing import Any

from harness.tools.plan.memory import MIB, Estimate, gib

WIDTH = 120
SMALL = 16 * MIB


def as_lines(found: Estimate, ranks_a_host: int, source: str) -> list[str]:
    """source: where the GPU's size comes from, as the end of a sentence. At most 120 columns."""
    gpu = gib(found.gpu_bytes)
    lines = [f"Memory of each GPU in GiB, estimated for {gpu} GiB ({source})"]
    lines += _sentence(_model(found))
    lines += _sentence(_engine(found))
    lines += ["", *_table(found), ""]
    if found.host_bytes:
        lines += _sentence(
            f"host memory: {gib(found.host_bytes)} GiB offloaded by each rank,"
            f" {gib(found.host_bytes * ranks_a_host)} on a host of {ranks_a_host}, before CUDA rounds pinned blocks up"
        )
    if found.fits:
        tightest = max(found.stages, key=lambda stage: stage.total)
        spare = gib(found.gpu_bytes - tightest.total)
        lines.append(f"VERDICT: it fits; {tightest.name} is the fullest stage and leaves {spare} GiB")
    else:
        lines.append("VERDICT: it does NOT fit")
        for number, problem in enumerate(found.problems, 1):
            lines += _sentence(f"{number}. {problem}", "     ")
    for note in found.notes:
        lines += _sentence(f"- {note}", "    ")
    return lines


def as_dict(found: Estimate) -> dict[str, Any]:
    """For --json; bytes."""
    stages = [{"name": stage.name, "total": stage.total, "parts": dict(stage.parts)} for stage in found.stages]
    engine = [asdict(share) for share in found.engine]
    names = ("gpu_bytes", "parameters", "buffers", "dtype", "fraction", "static_bytes", "kv_tokens", "bucket_bytes")
    plain = {name: getattr(found, name) for name in (*names, "host_bytes", "problems", "notes", "fits")}
    return plain | {"engine": engine, "stages": stages}


def _model(found: Estimate) -> str:
    buffers = f" and {found.buffers:,} in buffers" if found.buffers else ""
    return f"model: {found.parameters:,} parameters ({found.dtype}){buffers}"


def _engine(found: Estimate) -> str:
    parts = [
        (f"stage {share.stage} (layers {share.first_layer}-{share.last_layer}): " if len(found.engine) > 1 else "")
        + f"weights {_cell(share.weights)}, KV cache {share.kv_token:,} bytes a token"
        for share in found.engine
    ]
    room = f"room for {found.kv_tokens:,} tokens" if found.kv_tokens else "no room for a token"
    return (
        f"engine, each rank: {'; '.join(parts)}; mem_fraction_static = {found.fraction:g}"
        f" is {gib(found.static_bytes)} for both, {room}"
    )


def _table(found: Estimate) -> list[str]:
    names = list(dict.fromkeys(name for stage in found.stages for name in stage.parts))
    label = max(len(name) for name in (*names, "TOTAL"))
    widths = [max(len(stage.name), 7) for stage in found.stages]
    rows = [[stage.name for stage in found.stages]]
    rows += [[_cell(stage.parts[name]) if name in stage.parts else "-" for stage in found.stages] for name in names]
    rows.append([gib(stage.total) for stage in found.stages])
    rows.append(["fits" if stage.total <= found.gpu_bytes else "DOES NOT" for stage in found.stages])
    labels = ["", *names, "TOTAL", f"of {gib(found.gpu_bytes)}"]
    return [
        "  "
        + name.ljust(label)
        + "".join("  " + cell.rjust(max(width, 8)) for cell, width in zip(row, widths, strict=True))
        for name, row in zip(labels, rows, strict=True)
    ]


def _cell(nbytes: int) -> str:
    """Of a column in GiB; what would be 0.00 or 0.01 there, in MiB."""
    return "0" if nbytes == 0 else f"{nbytes / MIB:.1f} MiB" if nbytes < SMALL else gib(nbytes)


def _sentence(text: str, indent: str = "    ") -> list[str]:
    return wrap(text, WIDTH - 2, initial_indent="  ", subsequent_indent=indent, break_on_hyphens=False)
