"""python -m tests.tools.verify.run_senders MODEL TP EP: what launch/verify.py says of a server after every sender.

What the server then holds is compared with what it holds after it has loaded the newer checkpoint itself: that, and not
the sender's intention, decides whether verify must be silent. Exit code 1 if one verdict is wrong.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.rollout.engine import EngineFailed
from tests.tools.verify.plain_server import PlainServer
from tests.tools.verify.senders import BROKEN, RIGHT, DoesNotApply, Sender, Stack
from tests.tools.verify.versions import MODELS, make_versions

REPOSITORY = Path(__file__).resolve().parents[3]
Held = list[dict[str, str]]
"""What the server's checker says it holds: of each rank, each tensor's hash."""
Differing = dict[str, list[int]]
"""Tensor -> the ranks that hold something else than after the server's own load."""


@dataclass(frozen=True)
class Verdict:
    """How one run of launch/verify.py ended."""

    exit_code: int
    lines: list[str]
    different: Differing
    why: dict[str, str]
    """Tensor -> what explains it; "" for an unknown cause."""
    seconds: float
    megabytes: float
    """Of the largest of its processes."""


@dataclass(frozen=True)
class Row:
    """What a sender left in the server, and what verify says of it."""

    sender: str
    meant_right: bool
    is_alive: bool
    differing: Differing
    refused: str
    """What the server answered where it refused."""
    verdict: Verdict | None

    @property
    def is_right(self) -> bool:
        return self.is_alive and not self.differing

    @property
    def is_wrong_verdict(self) -> bool:
        if self.verdict is None:
            return False
        return self.verdict.exit_code != bool(self.differing) or self.verdict.different != self.differing

    def text(self) -> str:
        state = "died" if not self.is_alive else f"{len(self.differing)} differ" if self.differing else "right"
        note = "" if self.is_right == self.meant_right else " (not as meant)"
        return f"{self.sender:26} server: {state}{note}{f', refused: {self.refused[:60]}' if self.refused else ''}"

    def said(self) -> str:
        """Return how verify ended: its exit code, cost, and one of its explanations of each kind."""
        if self.verdict is None:
            return "not asked"
        unknown = sum(not why for why in self.verdict.why.values())
        why = list(dict.fromkeys(re.sub(r"layers\.\d+", "layers.N", why) for why in self.verdict.why.values() if why))
        cost = f"exit {self.verdict.exit_code}, {self.verdict.seconds:.1f} s, {self.verdict.megabytes:.0f} MB"
        causes = "; ".join([*why[:3], *([f"{unknown} unexplained"] if unknown else [])])
        return f"{'WRONG VERDICT: ' * self.is_wrong_verdict}{cost}{f'; {causes}' if causes else ''}"


class Stand:
    """One server, started again where a sender has killed it, and the two versions of its model."""

    def __init__(self, was: Path, new: Path, scratch: Path, arguments: dict[str, Any]) -> None:
        self.was, self.new, self._scratch = was, new, scratch
        self._arguments = {
            "model_path": str(was),
            "skip_tokenizer_init": True,
            "dtype": json.loads((was / "config.json").read_text())["dtype"],
        } | arguments
        self._seen: dict[str, Verdict] = {}
        self._start()
        self.stack.load(new)
        self.right = held(self.stack.server)

    def row(self, sender: Sender, asked: Sequence[str], each: bool) -> Row:
        """Raise DoesNotApply."""
        if not self.stack.server.is_up():
            self.close()
            self._start()
        self.stack.load(self.was)
        refused = ""
        try:
            sender(self.stack)
        except (EngineFailed, OSError) as error:
            refused = str(error)
        name, meant_right = sender.__name__, sender in RIGHT
        if not self.stack.server.is_up():
            return Row(name, meant_right, False, {}, refused, None)
        holds = held(self.stack.server)
        verdict = self._ask(holds, asked, each)
        return Row(name, meant_right, True, differing(holds, self.right), refused, verdict)

    def close(self) -> None:
        self.stack.server.close()

    def _ask(self, holds: Held, asked: Sequence[str], each: bool) -> Verdict | None:
        """Ask launch/verify.py, once for servers that hold the same, unless each is true."""
        key = json.dumps(holds, sort_keys=True)
        if asked and (each or key not in self._seen):
            words = ["--server", self.stack.server.url, "--weights", str(self.new), "--was", str(self.was)]
            self._seen[key] = ask([*asked, *words], self._scratch)
        return self._seen.get(key)

    def _start(self) -> None:
        server = PlainServer(self._arguments, self._scratch / "server.log")
        sent = self._scratch / "sent"
        sent.mkdir(exist_ok=True)
        self.stack = Stack(server, self.new, self.was, sent)


def held(server: PlainServer) -> Held:
    ranks = server.post("weights_checker", action="checksum")["ranks"]
    return [rank["checksums"] for rank in sorted(ranks, key=lambda rank: int(rank["parallelism_info"][0]["rank"]))]


def differing(holds: Held, right: Held) -> Differing:
    found = {name: [rank for rank, held in enumerate(holds) if held[name] != right[rank][name]] for name in right[0]}
    return {name: ranks for name, ranks in found.items() if ranks}


def ask(command: Sequence[str], scratch: Path) -> Verdict:
    """Run launch/verify.py to its end; measure it and the largest of its processes."""
    table, start = scratch / "verify.json", time.monotonic()
    table.unlink(missing_ok=True)
    with (scratch / "verify.out").open("w+b") as output:
        running = subprocess.Popen([*command, "--json", str(table)], stdout=output, stderr=output, cwd=REPOSITORY)
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)  # Popen would wait for it again
        output.seek(0)
        lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    different = json.loads(table.read_text())["different"] if table.exists() else []
    return Verdict(
        exit_code=running.returncode,
        lines=lines,
        different={each["tensor"]: each["ranks"] for each in different},
        why={each["tensor"]: each["why"] for each in different},
        seconds=time.monotonic() - start,
        megabytes=usage.ru_maxrss / 1024,
    )


def rows(stand: Stand, senders: Sequence[Sender], asked: Sequence[str], each: bool) -> Iterator[Row]:
    for sender in senders:
        try:
            row = stand.row(sender, asked, each)
        except DoesNotApply as reason:
            print(f"{sender.__name__:26} does not apply: {reason}", flush=True)
            continue
        print(f"{row.text()} | {row.said()}", flush=True)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("tp", type=int)
    parser.add_argument("ep", type=int)
    parser.add_argument("--senders", default="", help="a regular expression; all without it")
    parser.add_argument("--each", action="store_true", help="ask also about what a sender before has left just so")
    parser.add_argument("--no-verify", action="store_true", help="the server's own checksums alone")
    parser.add_argument("--json", type=Path, help="write the rows, with all that verify said")
    options = parser.parse_args()
    chosen = [sender for sender in (*RIGHT, *BROKEN) if re.search(options.senders, sender.__name__)]
    asked = [] if options.no_verify else [sys.executable, "launch/verify.py"]
    with tempfile.TemporaryDirectory(prefix="senders-") as scratch:
        was, new = make_versions(options.model, Path(scratch))
        parallel = {"tp_size": options.tp} | ({"ep_size": options.ep} if options.ep > 1 else {})
        stand = Stand(was, new, Path(scratch), parallel)
        try:
            found = list(rows(stand, chosen, asked, options.each))
        finally:
            stand.close()
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    wrong = [row.sender for row in found if row.is_wrong_verdict]
    print(
        f"{options.model}, tp {options.tp}, ep {options.ep}: {len(found)} senders; wrong verdicts: {', '.join(wrong) or 'none'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
