"""Requests that an sglang.Engine answers while other calls are made on it: pause, update the weights, continue.

Engine's methods run its event loop until their own answer is there. A request that was made a task of this loop moves
on in each of these calls, and its schedulers work on it all the time, so no thread is needed.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Literal

from harness.rollout.sglang_api import source
from harness.rollout.sglang_api.engine_calls import Engine
from harness.rollout.sglang_api.probe import IO_STRUCT, SGLangApi

PauseMode = Literal["in_place", "retract"]


class InFlight:
    """Prompts that the engine is answering."""

    def __init__(self, engine: Engine, prompts: int, arguments: Mapping[str, Any]) -> None:
        """Send the prompts; return when every one has its first token. arguments: of Engine.async_generate."""
        self._engine, self._prompts = engine, prompts
        self._answers: dict[int, dict[str, Any]] = {}
        self._begun = asyncio.Event()
        self._task = engine.loop.create_task(self._collect(arguments))
        engine.loop.run_until_complete(self._wait_for_begin())

    def finish(self) -> list[dict[str, Any]]:
        """Return the answers when all are complete, as Engine.generate does."""
        self._engine.loop.run_until_complete(self._task)
        return [self._answers[number] for number in range(self._prompts)]

    async def _wait_for_begin(self) -> None:
        begun = asyncio.ensure_future(self._begun.wait())
        await asyncio.wait({begun, self._task}, return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._task.done():
            self._task.result()  # raises what has ended it

    async def _collect(self, arguments: Mapping[str, Any]) -> None:
        """Keep the newest state of each answer: every chunk has all tokens so far."""
        async for chunk in await self._engine.async_generate(**arguments, stream=True):
            self._answers[chunk.get("index", 0)] = chunk
            if len(self._answers) == self._prompts:
                self._begun.set()


def pause_modes(api: SGLangApi) -> tuple[str, ...]:
    """Return the ways in which this SGLang can pause: "abort", and since 0.5.6 "in_place" and "retract"."""
    fields = source.annotations(api.tree.find_class("PauseGenerationReqInput", IO_STRUCT))
    return tuple(re.findall(r"'(\w+)'", source.unparsed(fields.get("mode"))))


def pause_generation(api: SGLangApi, engine: Engine, mode: PauseMode) -> None:
    """Stop generating, and keep all requests. Raise ValueError if this SGLang cannot pause in this way.

    in_place keeps the KV cache of the running requests, so it cannot be flushed meanwhile. retract drops it: with the
    next tokens it is computed anew.
    """
    if mode not in pause_modes(api):
        able = ", ".join(pause_modes(api)) or "nothing"
        raise ValueError(f'pause mode "{mode}": sglang {api.version} has {able}; use one of these, or another release')
    request = source.load(IO_STRUCT, "PauseGenerationReqInput")(mode=mode)
    engine.loop.run_until_complete(engine.tokenizer_manager.pause_generation(request))


def continue_generation(engine: Engine) -> None:
    """Go on generating."""
    request = source.load(IO_STRUCT, "ContinueGenerationReqInput")()
    engine.loop.run_until_complete(engine.tokenizer_manager.continue_generation(request))


def set_weight_version(engine: Engine, version: str) -> None:
    """Name the weights that the engine holds.

    Engine's own update methods take no version, though the requests they make do.

    Newer releases tell the schedulers, and each answer has the versions of all its tokens (meta_info.weight_versions).
    Before, only the tokenizer manager knows it, and an answer has the version at its end.
    """
    manager = engine.tokenizer_manager
    if hasattr(manager, "update_weight_version"):
        request = source.load(IO_STRUCT, "UpdateWeightVersionReqInput")(new_version=version, abort_all_requests=False)
        engine.loop.run_until_complete(manager.update_weight_version(request))
    else:
        manager._update_weight_version_if_provided(version)
