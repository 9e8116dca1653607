"""SGLang's unpickler refuses a payload that holds a class of your own."""

import base64
from dataclasses import dataclass

from harness.tools.repro.case import Case

CASE = Case(
    broken="the payload is a dataclass of the script",
    healthy="the payload is a dict",
    signature=(r"unsafe class|not allowed|[Bb]locked",),
    requires=("sglang",),
)


@dataclass
class Weights:
    names: list[str]


def program(broken: bool) -> None:
    from harness.runtime.cpu_standins import activate

    activate()
    from harness.rollout.sglang_api import serialize, source

    names = ["lm_head.weight"]
    payload = base64.b64encode(serialize(Weights(names) if broken else {"names": names})).decode()
    print("opened:", source.load("srt/utils/common.py", "MultiprocessingSerializer").deserialize(payload))
