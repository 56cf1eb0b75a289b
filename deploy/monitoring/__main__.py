"""Writes the dashboard anew; the package's docstring has the details."""

from __future__ import annotations

import argparse
import json

import deploy.monitoring
from deploy.monitoring import DASHBOARD, dashboard

argparse.ArgumentParser("python -m deploy.monitoring", description=deploy.monitoring.__doc__).parse_args()
DASHBOARD.parent.mkdir(exist_ok=True)
DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n")
print(f"wrote {DASHBOARD.name}")
