"""What every name of this stand-in is: importable, and an error when called."""

from collections.abc import Callable
from typing import Any, NoReturn


def stand_in(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotImplementedError for a name of sgl_kernel, such as kvcacheio.transfer_kv_direct."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name}: this is an import-only stand-in, no CPU build of sgl_kernel is published"
        )

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call
