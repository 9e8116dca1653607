"""Whether a scheduler's prefix cache is empty. SGLang has no call that tells, so its own object is looked at."""

import sys
import threading
from types import FrameType
from typing import Any


def cached_prefix_tokens(model: Any, _: None = None) -> int | None:
    """Return the tokens of prompts and responses in this scheduler's prefix cache; None if its cache cannot be found.

    It runs in the scheduler's process, on another thread than SGLang's.
    """
    cache = getattr(_scheduler(), "tree_cache", None)
    if cache is None:
        return None
    # A cache for sliding-window attention counts the tokens of two pools.
    return sum(_total(getattr(cache, name)()) for name in ("evictable_size", "protected_size"))


def _total(size: Any) -> int:
    return sum(size) if isinstance(size, tuple) else int(size)


def _scheduler() -> Any:
    """Return the Scheduler whose event loop SGLang's thread runs: a variable of run_scheduler_process."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and frame.f_code.co_name != "run_scheduler_process":
        frame = frame.f_back
    return frame.f_locals.get("scheduler") if frame else None
