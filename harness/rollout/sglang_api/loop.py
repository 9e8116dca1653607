"""The event loop of an sglang.Engine: calls that run in it, and the signal handlers that SGLang sets with it."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")


def await_in_engine(engine: Any, make: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Run `make(engine.tokenizer_manager)` to its end in the loop that the engine itself uses, without HTTP.

    The task that receives answers from the schedulers lives in that loop and is started first: until 0.5.9 flush_cache
    and check_weights do not start it themselves, and as a fresh engine's first call they would wait for ever.
    """
    manager = engine.tokenizer_manager

    async def run() -> T:
        manager.auto_create_handle_loop()
        return await make(manager)

    return _engine_loop(engine).run_until_complete(run())


def _engine_loop(engine: Any) -> asyncio.AbstractEventLoop:
    """The event loop in which the engine's calls run; older releases take the main thread's."""
    return cast(asyncio.AbstractEventLoop, getattr(engine, "loop", None) or asyncio.get_event_loop())


def for_another_thread(engine: Any, call: Callable[[], T]) -> Callable[[], T]:
    """The call, made ready to run on a thread that has no event loop: some releases look for the current one."""
    loop = _engine_loop(engine)

    def run() -> T:
        asyncio.set_event_loop(loop)
        return call()

    return run


def start_loop(engine: Any) -> None:
    """Start the task that receives the schedulers' answers, with which SGLang also takes over SIGTERM and SIGQUIT."""

    async def nothing(_: Any) -> None:
        return None

    await_in_engine(engine, nothing)


def remove_signal_handlers(engine: Any, signals: Sequence[signal.Signals]) -> None:
    """Remove the handlers that SGLang set in its event loop with start_loop. Raises RuntimeError where one stays.

    Inside the loop: uvloop, which SGLang makes the policy, removes nothing while it does not run, and calls the handler again
    as soon as it does.
    """
    loop = _engine_loop(engine)

    async def remove() -> list[signal.Signals]:
        for number in signals:
            loop.remove_signal_handler(number)
        return [number for number in signals if loop.remove_signal_handler(number)]

    if left := loop.run_until_complete(remove()):
        names = ", ".join(number.name for number in left)
        raise RuntimeError(f"SGLang's handlers of {names} stay in the engine's event loop, {type(loop).__module__}.")
