"""See the package."""

from __future__ import annotations

import json

from deploy.monitoring import DASHBOARD, dashboard

DASHBOARD.parent.mkdir(exist_ok=True)
DASHBOARD.write_text(json.dumps(dashboard(), indent=1) + "\n")
print(f"wrote {DASHBOARD.name}")
