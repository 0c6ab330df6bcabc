"""Public systems of the same kind, measured beside Reef: each in its own virtual environment, unchanged.

Knows: which packages, and how they are installed into a folder. How one is configured is in its own file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGES = {"litellm": "litellm[proxy]", "reef-infra": "reef-infra==0.0.2"}


def install(folder: Path) -> None:
    """Make or bring up to date each peer's virtual environment in `folder`."""
    for name, package in PACKAGES.items():
        place = folder / name
        python = place / "bin" / "python"
        print(f"{name}: installing {package} into {place} …", flush=True)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", package], check=True)
        print(f"{name}: {version(folder, name)}", flush=True)


def version(folder: Path, name: str) -> str:
    """The installed version, or a dash."""
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    python = folder / name / "bin" / "python"
    if not python.exists():
        return "-"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
