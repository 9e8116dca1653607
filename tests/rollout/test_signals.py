"""SIGQUIT after SGLang's handler was set in a real event loop, of both kinds that an engine may have."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvloop

from harness.rollout import sglang_api
from harness.rollout.signals import TAKEN, OwnHandlers, sigquit_raises

POLICIES = [uvloop.EventLoopPolicy, asyncio.DefaultEventLoopPolicy]


@pytest.fixture
def own() -> Iterator[OwnHandlers]:
    handlers = OwnHandlers()
    yield handlers
    handlers.restore(engine_serves=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_handler_set_in_the_loop_is_removed_for_every_later_call(
    policy: type[asyncio.AbstractEventLoopPolicy], own: OwnHandlers
) -> None:
    loop = policy().new_event_loop()
    engine = SimpleNamespace(loop=loop)
    called: list[str] = []

    async def start() -> None:
        for number in TAKEN:
            loop.add_signal_handler(number, called.append, "SGLang's")

    async def serve() -> None:
        os.kill(os.getpid(), signal.SIGQUIT)
        await asyncio.sleep(0.05)

    loop.run_until_complete(start())
    sglang_api.remove_signal_handlers(engine, TAKEN)
    own.restore(engine_serves=True)
    loop.run_until_complete(serve())
    loop.close()
    assert called == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_without_handlers_has_nothing_to_remove(policy: type[asyncio.AbstractEventLoopPolicy]) -> None:
    loop = policy().new_event_loop()
    sglang_api.remove_signal_handlers(SimpleNamespace(loop=loop), TAKEN)
    loop.close()


def test_handlers_are_as_before_once_the_engine_has_ended(own: OwnHandlers) -> None:
    before = [signal.getsignal(number) for number in TAKEN]
    own.restore(engine_serves=True)
    assert signal.getsignal(signal.SIGQUIT) not in before
    own.restore(engine_serves=False)
    assert [signal.getsignal(number) for number in TAKEN] == before


def test_sigquit_raises_instead_of_what_was_registered() -> None:
    before = signal.getsignal(signal.SIGQUIT)
    killed: list[int] = []
    try:
        with sigquit_raises():
            signal.signal(signal.SIGQUIT, lambda number, frame: killed.append(number))
            with pytest.raises(ChildProcessError):
                os.kill(os.getpid(), signal.SIGQUIT)
                time.sleep(5)
        assert not killed
        assert signal.signal.__name__ == "signal"
    finally:
        signal.signal(signal.SIGQUIT, before)
