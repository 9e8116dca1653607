"""Small real wheels, so that uv installs something without a network."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    code: str | Mapping[str, str],
    *,
    requires: Sequence[str] = (),
    requires_python: str = "",
) -> Path:
    """A pure wheel of one module, or of several files. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Python: {requires_python}"] if requires_python else []
    metadata += [f"Requires-Dist: {each}" for each in requires]
    files = {f"{module}/__init__.py": code} if isinstance(code, str) else dict(code)
    files[f"{info}/METADATA"] = "\n".join(metadata) + "\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"{module}-{version}-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
