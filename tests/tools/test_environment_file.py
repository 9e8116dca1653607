"""The versions in environment.json."""

from importlib import metadata

from harness.tools.environment_file import package_versions


def test_versions_of_what_is_not_installed() -> None:
    found = package_versions()
    assert found["torch"] == metadata.version("torch")
    assert all(version for version in found.values())
