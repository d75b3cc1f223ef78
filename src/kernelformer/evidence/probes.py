"""What is measured on a trained model besides its score, by name: functions from the folder of a run to plain JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PROBES: dict[str, Callable[[Path], dict[str, Any]]] = {}
