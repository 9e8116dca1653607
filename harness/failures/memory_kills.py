"""Whether the kernel's out-of-memory killer has struck: it sends SIGKILL as anyone may, and counts what it kills."""

from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path("/")


def counters(root: Path = ROOT) -> dict[str, int]:
    """How many processes it has killed, in the words of where that is counted. Those that cannot be read are left out.

    A cgroup's own counter comes first: of memory.events (v2) or memory.oom_control (v1), of this process's cgroup and
    those around it. The last one is all of the machine's.
    """
    files = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top, name = ("", "memory.events") if controllers == "" else ("memory", "memory.oom_control")
            group = root / "sys/fs/cgroup" / top
            # Inside of a container the path may be the host's, of which only the innermost part is mounted.
            for folder in (group / path.lstrip("/"), group):
                files[f"the cgroup {path}"] = folder / name
                if (folder / name).exists():
                    break
    files["this machine"] = root / "proc/vmstat"
    return {where: count for where, file in files.items() if (count := _count(file)) is not None}


@dataclass(slots=True)
class MemoryKills:
    """Since this was made."""

    root: Path = ROOT
    before: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.before = counters(self.root)

    def seen(self) -> str:
        """Where it has struck, in words; "" where it has not. A kill is told once."""
        now = counters(self.root)
        grown = [where for where, count in now.items() if count > self.before.get(where, count)]
        self.before = now
        return f"the out-of-memory killer has struck in {grown[0]}" if grown else ""


def _count(file: Path) -> int | None:
    for line in _lines(file):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
