"""What each rank did and when, as one lane of bars for each: pictures for the page, and where the ranks stood.

The bars are those of trace.json, which has all ranks and all steps.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.runtime.events import phase_of_step
from harness.tools.export.subject import OUTER_PHASES, RunEnd
from harness.tools.report.line_chart import ticks
from harness.tools.report.trace import Event, Span, began, spans

WIDTH, LEFT, RIGHT = 1160, 64, 40
LANE, BAR, TOP = 30, 24, 22
"""Pixels: the height of a lane, of the bar in it, and of what is above the first lane."""
STOOD = 16
"""Pixels below a bar, for where its rank stood."""
MOST_LANES = 8
LAST_STEPS = 4
"""Steps that are shown; of a longer run the last ones, in which a failure is."""
LETTER = 6.6
"""Pixels of a letter of the bars' text."""

GROUPS = {
    "start": "start",
    "weights": "weights and memory",
    "check": "checks",
    "generate": "generate",
    "train": "train",
    "other": "other",
}
"""The colours of bars (classes of the page's style), and what they mean."""
_GROUP_OF = {
    "resume_weights": "weights", "sync": "weights", "resume_kv_cache": "weights", "release": "weights", "first_release": "weights",
    "free_caches": "weights", "generate": "generate", "validate": "generate", "old_log_probs": "train",
    "reference_log_probs": "train", "values": "train", "advantages": "train", "update_critic": "train", "update_actor": "train",
    "inputs": "start", "quantize_model": "start", "import_sglang": "start", "start_engine": "start", "build_trainer": "start",
    "load_baseline": "start", "load_checkpoint": "start",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One phase of one rank."""

    x: float
    y: float
    width: float
    height: float
    group: str
    outcome: str  # ended, failed or open
    text: str  # inside the bar, if there is room
    title: str


@dataclass(frozen=True, kw_only=True)
class Lane:
    """One rank."""

    rank: int
    y: float
    bars: list[Bar]
    stood: str  # at the end of a run that did not pass


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One picture. Places are in pixels."""

    title: str
    lanes: list[Lane]
    seconds: list[tuple[float, str]]
    steps: list[tuple[float, str]]
    failure: float | None  # where the first failure was noticed
    groups: list[tuple[str, str]]  # of the bars that are shown
    note: str
    bottom: float  # where the lanes end


def timelines_of(events: Sequence[Event], seen: RunEnd | None) -> list[Timeline]:
    """Return a picture of the start and one of the steps; neither where no phase began.

    A start is long and its steps are short, so that in one picture nobody could read the steps. events: of all ranks,
    by time.
    """
    ended = seen.time if seen else 0.0
    phases = spans(events, ended)
    every = [*_start_spans(events), *phases]
    if not phases:
        return []
    all_ranks = sorted({span.rank for span in every})
    first = [rank for rank in all_ranks if seen and rank in seen.ranks]
    ranks = sorted([*first, *(rank for rank in all_ranks if rank not in first)][:MOST_LANES])
    stood = {} if seen and seen.code == 0 else where_ranks_stood(events, seen)
    begins: dict[int, float] = {}
    for span in phases:
        if span.step is not None:
            begins[span.step] = min(span.start, begins.get(span.step, span.start))
    shown_steps = sorted(begins)[-LAST_STEPS:]
    last = max(span.end for span in every)
    failed_at = ended - began(events) if ended else None
    of_ranks = f"{len(ranks)} of {len(all_ranks)} ranks" if len(ranks) < len(all_ranks) else ""
    of_steps = f"the last {LAST_STEPS} of {len(begins)} steps" if len(begins) > LAST_STEPS else ""
    if not begins:
        return [_picture("The start", every, ranks, (0.0, last), {}, stood, failed_at, of_ranks)]
    start = 0.0, min(begins.values())
    steps = begins[shown_steps[0]], last
    at_steps = {step: begins[step] for step in shown_steps}
    both = ", ".join(filter(None, [of_ranks, of_steps]))
    return [
        _picture("The start", every, ranks, start, {}, {}, None, of_ranks),
        _picture("The steps", every, ranks, steps, at_steps, stood, failed_at, both),
    ]


def _picture(
    title: str,
    every: Sequence[Span],
    ranks: Sequence[int],
    window: tuple[float, float],
    steps: Mapping[int, float],
    stood: Mapping[int, str],
    failed_at: float | None,
    shown: str,
) -> Timeline:
    """Return the picture of what these ranks did from window[0] to window[1], in seconds since the launch."""
    first, last = window
    scale = (WIDTH - LEFT - RIGHT) / (last - first or 1.0)

    def place(seconds: float) -> float:
        return round(LEFT + (min(max(seconds, first), last) - first) * scale, 1)

    spans_of = {
        rank: [span for span in every if span.rank == rank and span.end > first and span.start < last] for rank in ranks
    }
    groups = {_group_of(span) for own in spans_of.values() for span in own}
    lane = LANE + (STOOD if stood else 0)
    tops = {rank: TOP + lane * index for index, rank in enumerate(ranks)}
    return Timeline(
        title=f"{title}: what each rank did",
        lanes=[
            Lane(rank=rank, y=tops[rank], bars=list(_bars(own, tops[rank], place)), stood=stood.get(rank, ""))
            for rank, own in spans_of.items()
        ],
        seconds=[(place(at), f"{at:g}") for at in ticks(first, last, most=12)],
        steps=[(place(at), f"step {step}") for step, at in steps.items()],
        failure=None if failed_at is None else place(failed_at),
        groups=[(group, meaning) for group, meaning in GROUPS.items() if group in groups],
        note=f"Shown: {shown}; trace.json has all." if shown else "",
        bottom=TOP + lane * len(ranks),
    )


def where_ranks_stood(events: Sequence[Event], seen: RunEnd | None) -> dict[int, str]:
    """Return for each rank the phase that it was in, or had ended last, when its events ended."""
    inside: dict[int, list[str]] = defaultdict(list)
    last: dict[int, str] = {}
    for each in events:
        rank = each["rank"]
        last.setdefault(rank, "began no phase")
        if not each["event"].startswith("phase_") or each["phase"] in OUTER_PHASES:
            continue
        at = phase_of_step(each["phase"], each["step"])
        if each["event"] == "phase_start":
            inside[rank].append(at)
            continue
        if at in inside[rank]:
            inside[rank].remove(at)
        if not last[rank].startswith("failed"):  # what holds a phase that fails, fails after it
            last[rank] = f"failed in {at}" if each["event"] == "phase_failed" else f"after {at}"
    stood = {rank: f"in {inside[rank][-1]}" if inside[rank] else at for rank, at in sorted(last.items())}
    if seen is None:
        return stood
    how = f" ({seen.error})" if seen.kind == "died" else ""
    what = "furthest behind" if seen.kind == "deadline" else "first failure"
    return stood | {rank: f"{stood[rank]}{how}: {what}" for rank in seen.ranks if rank in stood}


def _start_spans(events: Sequence[Event]) -> Iterator[Span]:
    """Yield the parts of each rank's start, without those that were made meanwhile."""
    first, until = began(events), defaultdict[int, float](float)
    for each in sorted((each for each in events if each["event"] == "span"), key=lambda each: float(each["began"])):
        if each["began"] >= until[each["rank"]]:
            until[each["rank"]] = each["ended"]
            times = {"start": each["began"] - first, "end": each["ended"] - first}
            yield Span(rank=each["rank"], phase=each["part"], step=None, outcome="ended", **times)


def _group_of(span: Span) -> str:
    if span.phase.startswith("verify_"):
        return "check"
    return _GROUP_OF.get(span.phase, "start" if span.step is None and span.phase != "shutdown" else "other")


def _bars(own: Sequence[Span], top: float, place: Callable[[float], float]) -> Iterator[Bar]:
    """Yield the bars of one rank; those of phases that begin inside another one are lower."""
    ends: list[float] = []
    for span in sorted(own, key=lambda span: (span.start, -span.end)):
        ends = [end for end in ends if end > span.start]
        height = max(8, BAR - 7 * len(ends))
        ends.append(span.end)
        width = round(max(1.0, place(span.end) - place(span.start)), 1)
        how = {"ended": "", "failed": ", failed", "open": ", did not end"}[span.outcome]
        yield Bar(
            x=place(span.start),
            y=top + BAR - height,
            width=width,
            height=height,
            group=_group_of(span),
            outcome=span.outcome,
            text=span.phase if width > LETTER * len(span.phase) + 6 and height > 12 else "",
            title=f"rank {span.rank}: {phase_of_step(span.phase, span.step)}, {span.end - span.start:.2f} s{how}",
        )
