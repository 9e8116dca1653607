"""Find the largest engine.args.mem_fraction_static with which a config passes, resumed at once and in stages.

    python launch/memory.py --nproc-per-node 4 --low 0.4 --high 0.95 -- configs/gpu/memory_7b.toml [--section.key VALUE ...]

Each trial is a whole `torchrun ... launch/ppo.py CONFIG` on this host. Exit codes: 0 each way passes somewhere, 1 one never
does, 2 the command line is wrong, in one sentence, 125 this machine has no GPU.
"""

import json
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import _checkout

_checkout.use()

from harness.runtime.errors import UnsupportedEnvironment, report_user_error
from harness.tools import environments, preflight
from harness.tools.command_line import parse, read_options

if TYPE_CHECKING:
    from harness.tools.memory_search import Trial


@dataclass(kw_only=True)
class Options:
    """What to search."""

    nproc_per_node: int = 0
    """Ranks; 0 means as many as the config's mesh has."""
    low: float = 0.4
    """Least fraction to try."""
    high: float = 0.95
    """Largest fraction to try."""
    resolution: float = 0.02
    """Steps between the fractions that may be tried."""
    resume: tuple[Literal["all", "staged"], ...] = ("all", "staged")
    """Which values of memory.resume to search."""
    timeout: float = 900.0
    """Seconds after which a run counts as failed."""
    json: str = ""
    """File for all trials as JSON."""
    folder: str = ""
    """Where logs and run directories go; empty means a fresh folder in the system's temporary one."""


def main(arguments: list[str]) -> int:
    """Return the exit code; everything before the first trial must be instant."""
    environments.need("rich")
    from harness.tools import memory_search

    split = arguments.index("--") if "--" in arguments else len(arguments)
    words = arguments[split + 1 :]
    try:
        options = read_options(Options, "launch/memory.py", __doc__ or "", arguments[:split])
        if not words:
            raise ValueError("there is no config to try; give it after --, as in -- configs/gpu/memory_7b.toml.")
        command = parse(words)
        fractions = memory_search.candidates(options.low, options.high, options.resolution)
        if reason := preflight.no_gpu():
            raise UnsupportedEnvironment(f"{reason}, and without one there is no memory to release: nothing to search.")
        preflight.check_here(command.config)
    except (ValueError, UnsupportedEnvironment) as error:
        return report_user_error(error, rank=0)
    parallel = command.config.parallel
    ranks = options.nproc_per_node or parallel.dp * parallel.tp * parallel.pp
    folder = Path(options.folder).resolve() if options.folder else Path(tempfile.mkdtemp(prefix="harness-memory-"))
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C does: what runs is ended first
    print(f"logs and run directories: {folder}", flush=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    search = memory_search.MemorySearch(
        command=[*torchrun, str(Path(__file__).with_name("ppo.py")), *words],
        timeout_seconds=options.timeout,
        folder=folder,
        say=partial(print, flush=True),
    )
    found = search.find(fractions, options.resume)
    if options.json:
        runs = [asdict(trial) for trial in search.trials]
        Path(options.json).write_text(json.dumps({"largest": found, "runs": runs}, indent=1), encoding="utf-8")
    show(found, search.trials)
    return 0 if all(fraction is not None for fraction in found.values()) else 1


def show(found: dict[str, float | None], trials: "list[Trial]") -> None:
    """Print the table at the end."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Largest engine.args.mem_fraction_static that passes")
    for column in ("memory.resume", "largest", "runs", "least that failed", "its first error"):
        table.add_column(column)
    for resume, fraction in found.items():
        mine = [each for each in trials if each.resume == resume]
        failed = min((each for each in mine if not each.passed), key=lambda each: each.fraction, default=None)
        shown = "none" if fraction is None else f"{fraction:.3f}"
        at, why = (f"{failed.fraction:.3f}", failed.reason) if failed else ("-", "-")
        table.add_row(resume, shown, str(len(mine)), at, why)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
